import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans, SpectralClustering
from sklearn.metrics import adjusted_rand_score
from torch.overrides import TorchFunctionMode

from expect import expect_error
from protosteer.errors import DataError
from protosteer.paper import clustering
from protosteer.paper.prototypes import Centroids, centroids
from protosteer.util import spectral


def cone(images: int, dim: int, groups: int = 5, noise: float = 0.5, seed: int = 0) -> torch.Tensor:
    """Embeddings as a ViT gives for one class: one common direction, groups of unequal size around it."""
    random = np.random.default_rng(seed)
    common = random.normal(size=dim) / dim**0.5
    offsets = 0.7 * random.normal(size=(groups, dim)) / dim**0.5
    scales = np.arange(1, dim + 1) ** -0.5
    spread = noise * random.normal(size=(images, dim)) * scales / np.linalg.norm(scales)
    sizes = np.arange(groups, 0, -1)
    owner = np.concatenate([np.arange(groups), random.choice(groups, images - groups, p=sizes / sizes.sum())])
    return torch.from_numpy(10 * (common + offsets[owner] + spread)).float()


def reference_labels(x: torch.Tensor, count: int, assign: str = "discretize", seed: int = 0) -> np.ndarray:
    units = torch.nn.functional.normalize(x.double())
    clustering = SpectralClustering(count, affinity="precomputed", assign_labels=assign, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return clustering.fit_predict((units @ units.T).clamp(min=1e-8).numpy())


def by_hand(x: torch.Tensor, labels: np.ndarray) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(count, mean, deviation) of each group, from the definitions, in order of first member."""
    result = []
    for label in dict.fromkeys(labels.tolist()):
        rows = [x[i].double() for i in range(len(x)) if labels[i] == label]
        mean = sum(rows) / len(rows)
        result.append((len(rows), mean, (sum((row - mean) ** 2 for row in rows) / len(rows)).sqrt()))
    return result


def assert_groups(found: Centroids, x: torch.Tensor, labels: np.ndarray) -> None:
    wanted = by_hand(x, labels)
    assert found.counts.tolist() == [count for count, _, _ in wanted] and found.counts.dtype == torch.int64
    assert found.means.dtype == found.deviations.dtype == torch.float32
    torch.testing.assert_close(found.means, torch.stack([mean for _, mean, _ in wanted]).float())
    torch.testing.assert_close(found.deviations, torch.stack([dev for _, _, dev in wanted]).float())


def assert_same(a: Centroids, b: Centroids) -> None:
    assert torch.equal(a.means, b.means) and torch.equal(a.deviations, b.deviations)
    assert torch.equal(a.counts, b.counts)


def test_class_mean_is_equation_1():
    x = cone(40, 12)
    assert_groups(centroids(x, 1), x, np.zeros(40))
    assert_same(centroids(x, 1, method="kmeans"), centroids(x, 1))


@pytest.mark.parametrize("assign", ["discretize", "kmeans"])
def test_spectral_groups_are_scikit_learns_and_centroids_are_raw_means(assign):
    x = cone(150, 24, noise=0.1) * torch.linspace(0.5, 2, 150)[:, None]  # lengths must not be normalised away
    found = centroids(x, 5, assign=assign, seed=3)
    assert len(found.counts) == 5
    assert_groups(found, x, reference_labels(x, 5, assign, seed=3))


def test_negative_similarities_are_clipped():
    axes = torch.eye(6)[:2]
    x = torch.cat([axes, -axes]).repeat_interleave(12, 0) + 0.1 * torch.randn(48, 6, generator=_generator(0))
    assert_groups(centroids(x, 4), x, np.repeat(np.arange(4), 12))


def test_kmeans_is_scikit_learns_on_raw_embeddings():
    x = cone(120, 16) * torch.linspace(0.5, 2, 120)[:, None]
    labels = KMeans(4, n_init=10, random_state=7).fit_predict(x.double().numpy())
    assert_groups(centroids(x, 4, method="kmeans", seed=7), x, labels)


@pytest.mark.parametrize("assign, noise", [("discretize", 0.25), ("discretize", 0.5), ("kmeans", 0.5)])
def test_large_class_agrees_with_scikit_learn(assign, noise):
    x = cone(2000, 192, noise=noise)
    wanted = reference_labels(x, 5, assign)
    found = spectral.factored_labels(x.double().numpy(), 5, assign, seed=0)
    assert len(set(wanted.tolist())) == 5 and adjusted_rand_score(wanted, found) >= 0.97
    if assign == "discretize":
        assert_groups(centroids(x, 5), x, found)


def test_large_class_with_some_negative_similarities_agrees_with_scikit_learn():
    x = cone(1600, 768, noise=1.0)
    units = torch.nn.functional.normalize(x)
    assert 0 < (units @ units.T < 0).float().mean() < 0.01
    wanted = reference_labels(x, 5, "kmeans")
    found = spectral.factored_labels(x.double().numpy(), 5, "kmeans", seed=0)
    assert adjusted_rand_score(wanted, found) >= 0.97


@pytest.mark.parametrize("seed", range(4))
def test_both_paths_give_the_same_centroids_when_nothing_is_clipped(monkeypatch, seed):
    x = cone(300, 32, noise=0.3, seed=seed)
    units = torch.nn.functional.normalize(x)
    assert (units @ units.T).min() > 0
    dense = centroids(x, 5, seed=seed)
    monkeypatch.setattr(clustering, "DENSE_LIMIT", 0)
    factored = centroids(x, 5, seed=seed)
    assert torch.equal(dense.counts, factored.counts)
    torch.testing.assert_close(dense.means, factored.means)


def test_eigenvectors_are_those_of_the_affinity_without_its_diagonal():
    units = spectral.unit_rows(cone(30, 12).double().numpy())
    affinity = units @ units.T
    np.fill_diagonal(affinity, 0)
    roots = np.sqrt(affinity.sum(axis=1))
    wanted = np.linalg.eigh(affinity / np.outer(roots, roots))[1][:, -4:]
    found = spectral._leading_vectors(*spectral._factor(units), 4, np.linspace(-1, 1, 30))
    found = found * roots[:, None]
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-9)


def test_degrees_stay_positive_for_an_image_against_all_others():
    units = np.array([[1.0]] * 11 + [[-1.0]])
    assert spectral._factor(units)[2].min() >= spectral.DEGREE_FLOOR


class _LargestTensor(TorchFunctionMode):
    """Elements of the largest tensor that any torch function returned."""

    elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("assign", ["discretize", "kmeans"])
def test_large_class_never_builds_the_square_matrix(assign):
    n = 5000
    x = cone(n, 16)
    tracemalloc.start()  # sees NumPy's memory but not torch's
    try:
        with _LargestTensor() as largest:
            centroids(x, 5, assign=assign)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n * n  # less than a byte per pair
    assert largest.elements <= x.numel()


@pytest.mark.parametrize("limit", [1500, 0])
@pytest.mark.parametrize("method", ["spectral", "kmeans"])
def test_fewer_distinct_images_than_centroids(monkeypatch, method, limit):
    monkeypatch.setattr(clustering, "DENSE_LIMIT", limit)
    x = cone(5, 8)[[2, 0, 2, 1, 0, 2]]
    found = centroids(x, 5, method=method)
    assert found.counts.tolist() == [3, 2, 1] and torch.equal(found.means, x[[0, 1, 3]])
    assert torch.equal(found.deviations, torch.zeros(3, 8))


def test_as_many_distinct_images_as_centroids_and_signed_zeros():
    x = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]])
    assert centroids(x, 5).counts.tolist() == [2, 1] and centroids(cone(5, 8), 5).counts.tolist() == [1] * 5


@pytest.mark.parametrize("count", [1, 5])
def test_one_image_has_no_deviation(count):
    x = cone(5, 8)[:1]
    found = centroids(x, count)
    assert torch.equal(found.means, x) and torch.equal(found.deviations, torch.zeros(1, 8))
    assert found.counts.tolist() == [1]


def test_group_of_one_image_has_zero_deviation_among_larger_groups():
    x = torch.cat([cone(20, 8, groups=1, noise=0.05), -cone(5, 8)[:1]])
    found = centroids(x, 2)
    assert found.counts.tolist() == [20, 1] and torch.equal(found.deviations[1], torch.zeros(8))
    assert (found.deviations[0] > 0).all()


def test_groups_left_empty_are_dropped(monkeypatch):
    x = cone(10, 4)
    monkeypatch.setattr(clustering, "spectral_labels", lambda *_: np.array([4, 4, 4, 1, 1, 1, 4, 4, 1, 4]))
    assert_groups(centroids(x, 5), x, np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 0]))


@pytest.mark.parametrize("limit", [1500, 0])
@pytest.mark.parametrize("method, assign", [("spectral", "discretize"), ("spectral", "kmeans"), ("kmeans", "kmeans")])
def test_same_seed_same_centroids_and_global_generators_untouched(monkeypatch, method, assign, limit):
    monkeypatch.setattr(clustering, "DENSE_LIMIT", limit)
    x = cone(200, 16, noise=1.5)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = centroids(x, 6, method, assign, seed=5)
    assert torch.equal(torch.get_rng_state(), torch_state) and np.array_equal(np.random.get_state()[1], numpy_state)
    np.random.rand(3)
    assert_same(centroids(x, 6, method, assign, seed=5), first)


@pytest.mark.parametrize("limit", [1500, 0])
@pytest.mark.parametrize("method", ["spectral", "kmeans"])
def test_order_of_images_does_not_change_separated_centroids(monkeypatch, method, limit):
    monkeypatch.setattr(clustering, "DENSE_LIMIT", limit)
    x = cone(100, 32, groups=4, noise=0.05)
    order = torch.randperm(100, generator=_generator(1))
    first, second = centroids(x, 4, method), centroids(x[order], 4, method)
    matches = torch.cdist(first.means, second.means).argmin(dim=1)
    assert sorted(matches.tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(first.means, second.means[matches])
    torch.testing.assert_close(first.deviations, second.deviations[matches])
    assert torch.equal(first.counts, second.counts[matches])


AWKWARD = {
    "orthogonal images": torch.eye(12),
    "one direction, many lengths": torch.linspace(1, 2, 12)[:, None] * torch.ones(1, 4),
    "unconnected groups": torch.eye(8).repeat_interleave(2, 0) * torch.linspace(1, 2, 16)[:, None],
    "opposite images": torch.cat([torch.eye(8), -torch.eye(8)]),
    "one against all": torch.cat([torch.ones(11, 3) + torch.eye(11, 3), -torch.ones(1, 3)]),
    "one exactly against all": torch.tensor([1.0] * 11 + [-1.0])[:, None] * torch.linspace(1, 2, 12)[:, None],
    "an embedding of zeros": torch.cat([torch.eye(9) + 1, torch.zeros(1, 9)]),
    "fewer dimensions than groups": torch.linspace(1, 2, 15)[:, None],
    "duplicates": torch.eye(7).repeat(4, 1) + 0.5,
    "tiny and huge": torch.cat([1e-30 * (torch.eye(6) + 1), 1e30 * (torch.eye(6) + 2)]),
}


@pytest.mark.parametrize("limit", [1500, 0])
@pytest.mark.parametrize("assign", ["discretize", "kmeans"])
@pytest.mark.parametrize("x", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_embeddings_give_finite_centroids_quietly(monkeypatch, capfd, x, assign, limit):
    monkeypatch.setattr(clustering, "DENSE_LIMIT", limit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = centroids(x, 5, assign=assign)
    assert 1 <= len(found.counts) <= 5 and int(found.counts.sum()) == len(x)
    assert bool(torch.isfinite(found.means).all()) and bool(torch.isfinite(found.deviations).all())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("method", ["spectral", "kmeans"])
def test_scikit_learns_warnings_do_not_reach_the_user(monkeypatch, method):
    def loud(self, data):
        warnings.warn("look at me", UserWarning, stacklevel=2)
        return np.arange(len(data)) % 2

    monkeypatch.setattr(SpectralClustering, "fit_predict", loud)
    monkeypatch.setattr(KMeans, "fit_predict", loud)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert centroids(cone(10, 4), 2, method).counts.tolist() == [5, 5]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_embeddings_are_rejected_and_located(value):
    x = cone(10, 4)
    x[6, 2] = x[8, 0] = value
    for call in (lambda e: centroids(e, 1), lambda e: centroids(e, 3)):
        with expect_error("embeddings-not-finite", DataError, rows=[6, 8]):
            call(x)


@pytest.mark.parametrize("shape", [(0, 4), (4,), (2, 3, 4), (4, 0)])
def test_wrong_shapes_are_rejected(shape):
    with expect_error("bad-embedding-shape", DataError, shape=list(shape)):
        centroids(torch.ones(shape), 2)


def test_embeddings_may_carry_gradients_and_half_precision():
    x = cone(20, 8).bfloat16().requires_grad_()
    found = centroids(x, 2)
    assert not found.means.requires_grad
    assert_same(found, centroids(x.detach().float(), 2))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
