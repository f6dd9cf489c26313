"""One image more by closed forms, against a scorer that is built again; prototypes that are merged, against their sums."""

import pytest
import torch
import torch.nn.functional as F

from protosteer.evidence import kernel_ridge
from protosteer.evidence.class_statistics import ClassStatistics
from protosteer.evidence.kernel_ridge import KernelRidge, NystromRidge, arc_cosine
from protosteer.evidence.prototype_summary import EXACT_PROTOTYPES, MAX_PROTOTYPES, summarise_class
from protosteer.evidence.scorer import CoarseScorer
from protosteer.evidence.summary_table import SummaryTable
from protosteer.model.compaction import join_summaries

CLASSES, SPACES, DIM = 5, 3, 8


def summaries(per_class: int = 6, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, 1, SPACES, DIM, generator=draw)
    return [summarise_class(x + 0.8 * torch.randn(per_class, SPACES, DIM, generator=draw)) for x in centres]


def one_image(seed: int, count: int = 1):
    summary = summarise_class(torch.randn(1, SPACES, DIM, generator=torch.Generator().manual_seed(seed)))
    table = SummaryTable.of([summary])
    points = [table.decoded(space=space)[0].double() for space in range(SPACES)]
    weighted = type(summary)(summary.points, summary.counts * count, summary.deviations, summary.layers)
    return weighted, points


def queries():
    return torch.randn(7, SPACES * DIM, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("place", [1, 3])  # of a class that is known, and of a new one between others
def test_means_and_whitening_are_those_of_a_scorer_that_is_built_again(place):
    known, new = summaries(), place == 3
    labels = torch.tensor([0, 1, 2, 4, 5] if new else range(CLASSES))
    (first, points), (second, other) = one_image(1, 4), one_image(2)
    before = CoarseScorer(SummaryTable.of(known), torch.arange(CLASSES))
    updated = before.with_image(points, 4, place, new).with_image(other, 1, place, False)
    built = CoarseScorer(SummaryTable.of([*known, first, second]), torch.cat([labels, torch.tensor([place, place])]))
    units = F.normalize(queries().double().unflatten(1, (SPACES, -1)), dim=2)
    for space, (mine, theirs) in enumerate(zip(updated.whitened, built.whitened, strict=True)):
        torch.testing.assert_close(mine.scores(units[:, space]), theirs.scores(units[:, space]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(updated.lengths, built.lengths)
    assert updated.spaces[0].dof == built.spaces[0].dof and updated.scores(queries())[0].shape == (7, CLASSES + new)


@pytest.mark.parametrize("landmarks", [False, True])
def test_the_regression_with_images_more_solves_the_larger_system(landmarks, monkeypatch):
    monkeypatch.setattr(kernel_ridge, "LANDMARKS", 12)
    known = summaries()
    spaces = [ClassStatistics.of(SummaryTable.of(known), torch.arange(CLASSES), space=s) for s in range(SPACES)]
    before = NystromRidge(spaces) if landmarks else KernelRidge(spaces)
    images = [(one_image(1)[1], 8.0, 2), (one_image(2)[1], 1.0, 0)]
    updated = before
    for points, count, label in images:
        updated = updated.with_image(torch.cat(points), count, label, False)
    # The same by brute force, about the same centre.
    every = torch.cat([KernelRidge(spaces).points, *(before.joint(torch.cat(p)[None]) for p, _, _ in images)])
    counts = torch.cat([spaces[0].counts, torch.tensor([8.0, 1.0])])
    targets = F.one_hot(torch.cat([spaces[0].owners, torch.tensor([2, 0])]), CLASSES).double()
    asked = arc_cosine(before.joint(queries().double()), before.points if landmarks else every)
    if landmarks:
        across = arc_cosine(every, before.points)
        kernel = arc_cosine(before.points, before.points) + 1e-6 * torch.eye(12)
        system = across.T @ (counts[:, None] * across) + before.ridge * kernel
        expected = asked @ torch.linalg.solve(system, across.T @ (counts[:, None] * targets))
    else:
        kernel = arc_cosine(every, every) + torch.diag(before.ridge / counts)
        expected = asked @ torch.linalg.solve(kernel, targets)
    torch.testing.assert_close(updated.scores(queries().double()), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(asked @ updated.weights, expected, rtol=1e-6, atol=1e-6)
    # A class that comes in between others after that has a column of its own; the others stay as if it came first.
    last = updated.with_image(torch.cat(one_image(3)[1]), 1.0, 1, True).scores(queries().double())
    first = before.with_image(torch.cat(one_image(3)[1]), 1.0, 1, True)
    for points, count, label in images:
        first = first.with_image(torch.cat(points), count, label + (label > 0), False)
    torch.testing.assert_close(last, first.scores(queries().double()))
    wider = before.with_image(torch.cat(images[0][0]), 8.0, 1, True).scores(queries().double())
    assert wider.shape == (7, CLASSES + 1)
    columns = [0, 2, 3, 4, 5]
    same = before.with_image(torch.cat(images[0][0]), 8.0, 0, True).scores(queries().double())[:, 1:]
    torch.testing.assert_close(wider[:, columns], same)


@pytest.mark.parametrize("images", [20, 60])
def test_joined_summaries_keep_the_sum_and_no_more_prototypes_than_any_class(images):
    draw = torch.Generator().manual_seed(3)
    vectors = F.normalize(torch.randn(images, SPACES, DIM, generator=draw), dim=2)
    (joined,) = join_summaries([[summarise_class(image[None]) for image in vectors]])
    (again,) = join_summaries([[joined]])
    (more,) = join_summaries([[joined, *(summarise_class(image[None]) for image in vectors[:2])]])
    assert len(joined.points) <= MAX_PROTOTYPES and int(joined.counts.sum()) == images
    assert joined.num_exact == (images if images <= MAX_PROTOTYPES else EXACT_PROTOTYPES)
    assert torch.equal(again.points, joined.points) and torch.equal(again.counts, joined.counts)
    assert torch.equal(more.points[:EXACT_PROTOTYPES], joined.points[:EXACT_PROTOTYPES])
    table = SummaryTable.of([joined])
    for space, tolerance in enumerate([0.005, 0.06, 0.06]):  # of eight bits and four
        mean = (table.counts[:, None] * table.decoded(space=space)).sum(dim=0) / images
        assert float((mean - vectors[:, space].mean(dim=0)).abs().max()) < tolerance
    spread = vectors[:, 0].square().sum(dim=0) - (table.counts[:, None] * table.decoded().square()).sum(dim=0)
    assert float((images * joined.deviations.square() - spread).abs().max()) < 0.05 * images
