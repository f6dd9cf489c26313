"""Check every closed form of experiments/layers/reference.py by brute force, on small random data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from experiments.layers import reference
from experiments.layers.reference import KernelRidge, LayerClassifier, PrototypeTable, WhitenedCosine
from torch import Tensor

COUNTS = torch.tensor([1, 1, 1, 4, 2, 9])  # images behind the prototypes of a class: single images and clusters


def random_features(classes: int, count: int, spaces: int = 3, dim: int = 12, seed: int = 0) -> Tensor:
    """Return unit features [classes, count, spaces, dim] of classes that differ."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 1, spaces, dim, generator=generator, dtype=torch.double)
    noise = torch.randn(classes, count, spaces, dim, generator=generator, dtype=torch.double)
    return reference.unit_features(centres + 0.8 * noise)


def make_table(counts: Tensor) -> PrototypeTable:
    """Return a table of 5 classes with `counts` images behind the prototypes of each, without coding."""
    features = random_features(5, len(counts)).flatten(0, 1)
    owners, repeated = torch.arange(5).repeat_interleave(len(counts)), counts.repeat(5).double()
    rows = (repeated == 1).nonzero()[:, 0]
    return PrototypeTable(features, repeated, owners, counts.sum().double().repeat(5), rows)


def remove_row(table: PrototypeTable, row: int) -> PrototypeTable:
    keep = torch.arange(len(table.owners)) != row
    owners, counts = table.owners[keep], table.counts[keep]
    sizes = torch.zeros_like(table.sizes).index_add_(0, owners, counts)
    return PrototypeTable(table.features[keep], counts, owners, sizes, table.loo_rows[:0])


def scatter(table: PrototypeTable, space: int) -> Tensor:
    residuals = table.features[:, space] - table.class_means()[:, space][table.owners]
    return residuals.T @ (table.counts[:, None] * residuals)


@pytest.fixture(params=[torch.ones(6, dtype=torch.int64), COUNTS], ids=["images", "clusters"])
def table(request: pytest.FixtureRequest) -> PrototypeTable:
    return make_table(request.param)


@pytest.fixture
def query() -> Tensor:
    return random_features(3, 2, seed=4).flatten(0, 1)


def whitened_cosine(query: Tensor, means: Tensor, centre: Tensor, precision: Tensor) -> Tensor:
    root = torch.linalg.cholesky(precision)
    return F.normalize((query - centre) @ root, dim=1) @ F.normalize((means - centre) @ root, dim=1).T


def test_whitened_cosine(table: PrototypeTable, query: Tensor) -> None:
    for space in range(3):
        fitted = WhitenedCosine(table, space)
        expected = whitened_cosine(query[:, space], fitted.means, fitted.centre, fitted.precision)
        torch.testing.assert_close(fitted.scores(query[:, space]), expected)


def test_leave_one_out_of_the_whitened_cosine(table: PrototypeTable) -> None:
    for space in range(3):
        fitted, dof = WhitenedCosine(table, space), float((table.sizes - 1).sum())
        added = fitted.shrinkage * scatter(table, space).trace() / dof / 12 * torch.eye(12, dtype=torch.double)
        expected = []
        for row in table.loo_rows.tolist():
            rest = remove_row(table, row)
            precision = torch.linalg.inv((1 - fitted.shrinkage) * scatter(rest, space) / dof + added)
            image, means = table.features[row : row + 1, space], rest.class_means()[:, space]
            expected.append(whitened_cosine(image, means, fitted.centre, precision))
        torch.testing.assert_close(fitted.loo_scores(), torch.cat(expected), rtol=1e-9, atol=1e-9)


def test_leave_one_out_of_the_ridge(table: PrototypeTable) -> None:
    ridge = KernelRidge(table)
    z = ridge.prototypes
    for number, row in enumerate(table.loo_rows.tolist()):
        keep = torch.arange(len(z)) != row
        kernel = reference.arc_cosine(z[keep], z[keep])
        kernel += torch.diag(reference.RIDGE_LAMBDA / table.counts[keep])
        weights = torch.linalg.solve(kernel, ridge.targets[keep])
        expected = reference.arc_cosine(z[row : row + 1], z[keep]) @ weights
        torch.testing.assert_close(ridge.loo_scores()[number], expected[0], rtol=1e-8, atol=1e-8)


def test_a_prototype_of_n_images_equals_n_copies(query: Tensor) -> None:
    table = make_table(COUNTS)
    rows = torch.arange(30).repeat_interleave(COUNTS.repeat(5))
    ones = torch.ones(len(rows), dtype=torch.double)
    copies = PrototypeTable(table.features[rows], ones, table.owners[rows], table.sizes, table.loo_rows[:0])
    torch.testing.assert_close(
        KernelRidge(table).scores(query), KernelRidge(copies).scores(query), rtol=1e-6, atol=1e-6
    )
    for space in range(3):
        first, second = WhitenedCosine(table, space), WhitenedCosine(copies, space)
        torch.testing.assert_close(first.scores(query[:, space]), second.scores(query[:, space]))


def test_the_joint_cosine_is_the_mean_cosine(table: PrototypeTable) -> None:
    ridge = KernelRidge(table)
    unit = F.normalize(table.features - ridge.centre, dim=2)
    mean = torch.einsum("isd,jsd->ij", unit, unit) / 3
    torch.testing.assert_close(ridge.prototypes @ ridge.prototypes.T, mean)


def test_landmarks(monkeypatch: pytest.MonkeyPatch, query: Tensor) -> None:
    table = make_table(torch.ones(6, dtype=torch.int64))
    exact = KernelRidge(table)
    monkeypatch.setattr(reference, "MAX_EXACT_PROTOTYPES", 10)
    monkeypatch.setattr(reference, "LANDMARKS", 30)
    full = KernelRidge(table)  # every prototype is a landmark: only the jitter differs
    torch.testing.assert_close(full.scores(query), exact.scores(query), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(full.loo_scores(), exact.loo_scores(), rtol=1e-2, atol=2e-3)

    monkeypatch.setattr(reference, "LANDMARKS", 12)
    few = KernelRidge(table)
    kernel = reference.arc_cosine(few.prototypes, few.prototypes) + 1e-6 * torch.eye(12, dtype=torch.double)
    images = reference.arc_cosine(few.joint_features(table.features), few.prototypes)

    def solve(keep: Tensor) -> Tensor:
        gram = images[keep].T @ images[keep] + reference.RIDGE_LAMBDA * kernel
        return torch.linalg.solve(gram, images[keep].T @ few.targets[keep])

    rows = torch.arange(30)
    torch.testing.assert_close(few.weights, solve(rows >= 0), rtol=1e-5, atol=1e-5)
    expected = torch.stack([images[row] @ solve(rows != row) for row in range(30)])
    torch.testing.assert_close(few.loo_scores(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dim", "bits", "limit"), [(192, 4, 0.02), (192, 8, 3e-4), (9, 4, 0.04), (9, 8, 6e-4)])
def test_coding(dim: int, bits: int, limit: float) -> None:
    vectors = torch.randn(40, 3, dim, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    if dim == 192:
        vectors[:, :, 7] *= 30  # an outlying dimension must not cost the others
    turn = reference.cosine_transform(dim)
    torch.testing.assert_close(turn @ turn.T, torch.eye(dim, dtype=torch.double))
    numbers, scales = reference.encode(vectors, bits)
    assert (numbers.shape, numbers.dtype) == (vectors.shape, torch.uint8)
    assert int(numbers.max()) < 2**bits
    errors = (reference.decode(numbers, scales, bits) - vectors).square().sum() / vectors.square().sum()
    assert float(errors) < limit
    zeros = torch.zeros_like(vectors)
    torch.testing.assert_close(reference.decode(*reference.encode(zeros, bits), bits), zeros, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [192, 25])
def test_class_summaries(dim: int) -> None:
    few, many = random_features(1, 20, 6, dim)[0], random_features(1, 500, 6, dim)[0]
    small, large = reference.summarise_class(few), reference.summarise_class(many)
    assert small.counts.tolist() == [1] * 20
    assert float((small.prototypes - few).square().sum() / few.square().sum()) < 1e-3
    assert len(large.singles) == reference.SINGLES
    assert len(large.counts) <= reference.SINGLES + reference.CLUSTERS
    assert large.prototypes.shape == (len(large.counts), 6, dim)
    assert int(large.counts.sum()) == 500
    mean = (large.prototypes * large.counts[:, None, None]).sum(dim=0) / 500
    assert float((mean - many.mean(dim=0)).norm() / many.std(dim=0).norm()) < 0.05
    assert max(small.byte_count, large.byte_count) <= 25_000
    torch.testing.assert_close(reference.summarise_class(many).clusters, large.clusters)


def test_codes_of_single_images_do_not_depend_on_their_class() -> None:
    first, second = random_features(2, 6, 3, 24)
    mixed = reference.summarise_class(torch.cat([first[:2], second]))
    torch.testing.assert_close(reference.summarise_class(first).singles[:2], mixed.singles[:2])


def test_order_of_classes_and_split_into_tasks_do_not_matter() -> None:
    features = random_features(6, 5, 3, 24)
    query = random_features(6, 2, 3, 24, seed=3).flatten(0, 1)
    summaries, order = [reference.summarise_class(images) for images in features], [3, 1, 5, 0, 2, 4]
    expected = LayerClassifier(summaries, 2).logits(query)
    reordered = LayerClassifier([summaries[label] for label in order], 2).logits(query)
    torch.testing.assert_close(expected[:, order], reordered, rtol=1e-4, atol=1e-4)
    parts = [reference.summarise_class(images) for images in (features[0, :2], features[0, 2:])]
    two_tasks = LayerClassifier([*parts, *summaries[1:]], 2, [0, 0, 1, 2, 3, 4, 5]).logits(query)
    torch.testing.assert_close(two_tasks, expected, rtol=1e-4, atol=1e-4)


def test_few_images() -> None:
    features = random_features(4, 1, 3, 24)
    images = features[:, 0]
    one = LayerClassifier([reference.summarise_class(image) for image in features], 2)
    torch.testing.assert_close(one.shares, reference.prior_shares(2, 1))
    assert one.scale == reference.DEFAULT_SCALE
    assert one.logits(images).argmax(dim=1).tolist() == [0, 1, 2, 3]
    one_class = LayerClassifier([reference.summarise_class(random_features(1, 3, 3, 24)[0])], 2)
    copies = LayerClassifier([reference.summarise_class(image.expand(3, -1, -1)) for image in features], 2)
    assert one_class.logits(images).isfinite().all()
    assert copies.logits(images).isfinite().all()


def test_shares_minimise_the_penalised_distance() -> None:
    labels, numbers = torch.arange(2000) % 10, torch.arange(2000)
    noise = torch.randn(2000, 10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    scores = 0.2 * noise
    scores[numbers, labels, 1] += 0.5
    prior = torch.tensor([0.8, 0.1, 0.1], dtype=torch.double)
    shares = reference.fit_shares(scores, labels, prior)
    assert shares[1] > 0.8
    assert reference.fit_shares(scores[:3], labels[:3], prior)[0] > 0.5  # three images do not overrule the prior

    def smallest(candidate: Tensor) -> float:
        logits = (scores @ candidate)[None] * torch.linspace(2, 60, 59, dtype=torch.double)[:, None, None]
        root = (logits[:, numbers, labels] - logits.logsumexp(dim=2)).div(2).exp()
        penalty = reference.PRIOR_IMAGES * prior @ (candidate / candidate.sum()).log()
        return float(2 * (1 - root).sum(dim=1).min() - penalty)

    best = smallest(shares)
    for score in range(3):
        for factor in (0.9, 1.1):
            changed = shares.clone()
            changed[score] *= factor
            assert smallest(changed) > best - 1e-2


def test_the_scale_maximises_the_likelihood() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 10, generator=generator, dtype=torch.double)
    labels = torch.multinomial((3 * logits).softmax(dim=1), 1, generator=generator)[:, 0]
    assert reference.fit_scale(logits, labels) == pytest.approx(3, abs=0.4)


def test_feature_spaces() -> None:
    assert reference.feature_layers(12) == ([12, 11, 10, 8], [10, 7])
    assert reference.feature_layers(24) == ([24, 22, 20, 16], [20, 14])
    assert reference.feature_layers(4)[0][0] == 4
    assert min(sum(reference.feature_layers(1), [])) == 1
    tokens = torch.randn(4, 3, 24, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    expected = F.normalize(F.layer_norm(tokens, (24,), eps=0.0), dim=-1)
    torch.testing.assert_close(reference.unit_features(tokens), expected)
