"""Every closed form against its brute-force twin: leaving an image out really, solving really, sampling."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.covariance import OAS

from protosteer.evidence import class_statistics as spaces
from protosteer.evidence import kernel_ridge as ridging
from protosteer.evidence.class_statistics import ClassStatistics
from protosteer.evidence.kernel_ridge import KernelRidge, NystromRidge, arc_cosine
from protosteer.evidence.prototype_summary import (
    EXACT_PROTOTYPES,
    MAX_PROTOTYPES,
    ClassSummary,
    summarise_class,
    unpack_prototypes,
)
from protosteer.evidence.scorer import CoarseScorer
from protosteer.evidence.summary_table import SummaryTable
from protosteer.evidence.whitened import WhitenedCosine, oas

DIM = 6


def clouds(sizes=(7, 5, 9), seed=0, dim=DIM):
    """Unit vectors of classes around different means."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(sizes), dim, generator=draw)
    return [
        F.normalize(c + 0.6 * torch.randn(n, dim, generator=draw), dim=1) for c, n in zip(centres, sizes, strict=True)
    ]


def sketches(classes):
    return [summarise_class(embeddings) for embeddings in classes]


def queries(count=8, dim=DIM):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(9))


def test_a_small_class_is_sketched_by_its_images():
    embeddings = 3.0 * clouds()[0]
    drawn = summarise_class(embeddings)
    assert torch.allclose(drawn.points, F.normalize(embeddings, dim=1), atol=0.5 / 127)
    assert drawn.counts.tolist() == [1] * 7 and not drawn.deviations.any()
    assert drawn.num_exact == 7


def test_a_large_class_is_sketched_by_some_images_and_groups_of_the_others():
    (embeddings,) = clouds([100])
    drawn = summarise_class(embeddings, seed=3)
    assert len(drawn.points) == MAX_PROTOTYPES and drawn.num_exact == EXACT_PROTOTYPES
    assert drawn.counts.sum() == 100
    for point in drawn.points[:EXACT_PROTOTYPES]:
        assert (embeddings - point).norm(dim=1).min() < 0.01
    # Nothing of the total spread is lost: what is not between points is in the deviations.
    mean = embeddings.mean(dim=0)
    whole = ((embeddings - mean) ** 2).mean(dim=0)
    between = ((drawn.points - mean) ** 2 * drawn.counts[:, None]).sum(dim=0) / 100
    assert torch.allclose(between + drawn.deviations**2, whole, atol=4e-3)


def test_a_sketch_fits_into_eight_bits_and_depends_on_its_seed_alone():
    (embeddings,) = clouds([60])
    drawn = summarise_class(embeddings, seed=1)
    packed = SummaryTable.of([drawn]).packed()
    assert packed["points"].dtype == torch.int8
    assert packed["steps"].dtype == packed["deviations"].dtype == torch.float16
    assert torch.equal(unpack_prototypes(packed["points"], packed["steps"]), drawn.points)
    assert torch.equal(packed["deviations"].float()[0], drawn.deviations)
    again = summarise_class(embeddings, seed=1)
    assert torch.equal(drawn.points, again.points)
    assert not torch.equal(drawn.points, summarise_class(embeddings, seed=2).points)


def test_single_points_are_the_same_images_in_every_space():
    (embeddings,) = clouds([50])
    turned = embeddings.flip(1)  # another space
    assert torch.equal(
        summarise_class(embeddings, 5).points[:EXACT_PROTOTYPES].flip(1),
        summarise_class(turned, 5).points[:EXACT_PROTOTYPES],
    )


@pytest.mark.parametrize("sizes", [(30, 25, 40), (3, 2, 4)])
def test_shrinkage_is_that_of_scikit_learn(sizes):
    rows = torch.cat([c - c.mean(dim=0) for c in clouds(sizes)]).double()
    covariance = rows.T @ rows / len(rows)
    theirs = OAS(assume_centered=True).fit(rows.numpy()).shrinkage_
    assert oas(covariance, len(rows)) == pytest.approx(theirs, abs=1e-9)


def brute_whitened(classes, query):
    """From all images, with nothing that is not on the page."""
    means = torch.stack([c.mean(dim=0) for c in classes])
    rows = torch.cat([c - m for c, m in zip(classes, means, strict=True)])
    freedom = len(rows) - len(classes)
    covariance = rows.T @ rows / freedom
    share = oas(covariance, freedom)
    dim = len(covariance)
    shrunk = (1 - share) * covariance + share * covariance.trace() / dim * torch.eye(dim).double()
    values, vectors = torch.linalg.eigh(shrunk)
    whitening = vectors @ torch.diag(values**-0.5) @ vectors.T
    centre = means.mean(dim=0)
    return F.normalize((query - centre) @ whitening, dim=1) @ F.normalize((means - centre) @ whitening, dim=1).T


def test_whitened_cosine_is_the_cosine_of_whitened_vectors():
    classes = [s.points.double() for s in sketches(clouds())]
    unit = F.normalize(queries().double(), dim=1)
    ours = WhitenedCosine(ClassStatistics.of(sketches(clouds()))).scores(unit)
    assert torch.allclose(ours, brute_whitened(classes, unit), atol=1e-10)


def test_whitening_needs_no_more_than_the_points_of_a_large_class():
    """Points with counts and deviations hold the class means exactly and the spread nearly."""
    classes = clouds([200, 150, 300])
    unit = F.normalize(queries().double(), dim=1)
    ours = WhitenedCosine(ClassStatistics.of(sketches(classes))).scores(unit)
    assert torch.allclose(ours, brute_whitened([c.double() for c in classes], unit), atol=0.08)


def test_left_out_whitened_scores_are_those_of_a_model_without_the_image():
    """Centre and shrinkage stay, which is what the closed form says."""
    drawn = sketches(clouds())
    whitened = WhitenedCosine(ClassStatistics.of(drawn))
    rows = whitened.statistics.loo_rows
    ours = whitened.loo_scores()
    share = whitened.shrinkage
    scale = whitened.statistics.scatter.trace() / float((whitened.statistics.sizes - 1).sum()) / DIM
    for i, row in enumerate(rows.tolist()):
        owner = int(whitened.statistics.owners[row])
        place = row - int((whitened.statistics.owners < owner).sum())
        keep = torch.arange(len(drawn[owner].points)) != place
        without = list(drawn)
        without[owner] = ClassSummary(drawn[owner].points[keep], drawn[owner].counts[keep], drawn[owner].deviations)
        space = ClassStatistics.of(without)
        freedom = float((whitened.statistics.sizes - 1).sum())
        precision = torch.linalg.inv((1 - share) * space.scatter / freedom + share * scale * torch.eye(DIM).double())
        query, means = whitened.statistics.points[row] - whitened.centre, space.means - whitened.centre
        lengths = (query @ precision @ query) * ((means @ precision) * means).sum(dim=1)
        assert torch.allclose(ours[i], (means @ precision @ query) / lengths.sqrt(), atol=1e-9)


def test_one_image_per_class_leaves_nothing_to_whiten_with():
    drawn = sketches(clouds([1, 1, 1]))
    coarse = CoarseScorer(drawn)
    means = coarse.statistics.means
    scores = coarse.whitened[0].scores(coarse.statistics.points)
    assert torch.allclose(scores.diagonal(), torch.ones(3).double()) and not len(coarse.statistics.loo_rows)
    centred = F.normalize(means - means.mean(dim=0), dim=1)
    assert torch.allclose(scores, centred @ centred.T)


def test_a_class_alone_is_seen_from_the_origin():
    scores, similarities = CoarseScorer(sketches(clouds([8]))).scores(queries())
    assert scores.isfinite().all() and similarities.isfinite().all()
    assert similarities.std() > 0.1  # tells what is like the class from what is not


def test_the_kernel_is_the_limit_of_random_relu_features():
    a = F.normalize(queries(3).double(), dim=1)
    directions = torch.randn(DIM, 400_000, generator=torch.Generator().manual_seed(1)).double()
    hidden = (a @ directions).relu()
    assert torch.allclose(arc_cosine(a, a), 2 * hidden @ hidden.T / directions.shape[1], atol=0.01)


def test_ridge_over_points_with_counts_is_ridge_over_their_copies():
    """A point that stands for n images weighs as n equal ones."""
    drawn = sketches(clouds())
    counts = torch.tensor([3, 1, 2, 1, 1, 4, 1])
    weighted = [ClassSummary(drawn[0].points, counts, drawn[0].deviations), *drawn[1:]]
    points = drawn[0].points.repeat_interleave(counts, dim=0)
    copies = [ClassSummary(points, torch.ones(len(points), dtype=torch.int64), drawn[0].deviations), *drawn[1:]]
    unit = F.normalize(queries().double(), dim=1)
    ours, theirs = (KernelRidge([ClassStatistics.of(s)]).scores(unit) for s in (weighted, copies))
    assert torch.allclose(ours, theirs, atol=1e-8)


def test_left_out_ridge_scores_are_those_of_a_ridge_without_the_point():
    space = ClassStatistics.of(sketches(clouds()))
    ridge, rows, targets = KernelRidge([space]), space.loo_rows, F.one_hot(space.owners).double()
    ours = ridge.loo_scores
    assert len(rows) == len(ridge.points)
    for row in rows.tolist():
        keep = rows != row
        kernel = arc_cosine(ridge.points[keep], ridge.points[keep])
        kernel = kernel + ridging.RIDGE * torch.eye(len(kernel)).double()
        solution = torch.linalg.solve(kernel, targets[keep])
        assert torch.allclose(ours[row], arc_cosine(ridge.points[[row]], ridge.points[keep]) @ solution, atol=1e-8)


def test_left_out_similarity_is_that_to_the_mean_of_the_others():
    drawn = sketches(clouds())
    coarse = CoarseScorer(drawn)
    _, similarities = coarse.loo_scores()
    whitened = coarse.whitened[0].loo_scores()
    points = drawn[1].points.double()
    others = points[1:].mean(dim=0)
    plain = 2 * similarities[7, 1] - whitened[7, 1]  # image 0 of class 1
    assert plain == pytest.approx(float(F.cosine_similarity(points[0], others, dim=0)), abs=1e-9)


def test_order_of_classes_changes_nothing_but_columns():
    drawn = sketches(clouds())
    turned = [drawn[i] for i in (2, 0, 1)]
    ours, theirs = CoarseScorer(drawn).scores(queries())[0], CoarseScorer(turned).scores(queries())[0]
    assert torch.allclose(ours[:, [2, 0, 1]], theirs, atol=1e-9)


def test_landmarks_that_are_all_points_make_the_exact_ridge():
    space = ClassStatistics.of(sketches(clouds([60, 5, 9])))
    exact, ours = KernelRidge([space]), NystromRidge([space])
    unit = F.normalize(queries().double(), dim=1)
    assert torch.allclose(ours.scores(unit), exact.scores(unit), atol=1e-4)
    assert torch.allclose(ours.loo_scores, exact.loo_scores, atol=1e-4)


def test_landmarks_span_a_ridge_over_all_points(monkeypatch):
    """Against the normal equations in the span of the landmarks, with and without each image."""
    monkeypatch.setattr(ridging, "LANDMARKS", 7)
    space = ClassStatistics.of(sketches(clouds()))
    ours, points = NystromRidge([space]), F.normalize(space.points.double(), dim=1)
    assert len(ours.points) == 7
    unit = F.normalize(queries().double(), dim=1)
    across, targets = arc_cosine(points, ours.points), F.one_hot(space.owners).double()
    span = ridging.RIDGE * arc_cosine(ours.points, ours.points)

    def solved(keep):
        return torch.linalg.solve(across[keep].T @ across[keep] + span, across[keep].T @ targets[keep])

    every = torch.arange(len(points))
    assert torch.allclose(ours.scores(unit), arc_cosine(unit, ours.points) @ solved(every), atol=1e-4)
    without = torch.stack([across[row] @ solved(every[every != row]) for row in space.loo_rows])
    assert torch.allclose(ours.loo_scores, without, atol=1e-4)


def test_how_many_points_there_are_decides_on_the_ridge(monkeypatch):
    space = ClassStatistics.of(sketches(clouds()))
    assert type(KernelRidge.of([space])) is KernelRidge
    monkeypatch.setattr(ridging, "MAX_PROTOTYPES", len(space.points) - 1)
    assert type(KernelRidge.of([space])) is NystromRidge
    monkeypatch.setattr(ridging, "MIN_LANDMARKS_PER_CLASS", ridging.LANDMARKS // 2)
    assert KernelRidge.of([space]) is None


def test_images_to_leave_out_are_spread_evenly_where_there_are_too_many(monkeypatch):
    drawn = sketches(clouds([30, 30, 30]))
    monkeypatch.setattr(spaces, "MAX_LOO_IMAGES", 9)
    monkeypatch.setattr(spaces, "MIN_LOO_IMAGES", 1)
    space = ClassStatistics.of(drawn)
    assert space.owners[space.loo_rows].bincount().tolist() == [3, 3, 3]
    monkeypatch.setattr(spaces, "LOO_SCORES", 18)
    assert len(ClassStatistics.of(drawn).loo_rows) == 6


def test_without_room_for_the_ridge_whitening_stands_alone(monkeypatch):
    monkeypatch.setattr(ridging, "MAX_PROTOTYPES", 5)
    monkeypatch.setattr(ridging, "LANDMARKS", 5)
    coarse = CoarseScorer(sketches(clouds()))
    unit = F.normalize(queries().double(), dim=1)
    assert coarse.ridge is None and torch.equal(coarse.scores(queries())[0], coarse.whitened[0].scores(unit))
