"""Distances against scipy's, one image and class at a time; what becomes of a covariance against a loop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import mahalanobis

from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.fecam import FeCAM, metric
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images

NAMES = [name for group in GROUPS for name in group]


def by_hand(rows: np.ndarray, gamma1: float, gamma2: float) -> np.ndarray:
    covariance = np.cov(rows.T)
    dim = len(covariance)
    on = np.mean([covariance[i, i] for i in range(dim)])
    off = np.mean([covariance[i, j] for i in range(dim) for j in range(dim) if i != j])
    shrunk = np.empty_like(covariance)
    for i in range(dim):
        for j in range(dim):
            shrunk[i, j] = covariance[i, j] + (gamma1 * on if i == j else gamma2 * off)
    return np.array([[shrunk[i, j] / np.sqrt(shrunk[i, i] * shrunk[j, j]) for j in range(dim)] for i in range(dim)])


@pytest.mark.parametrize(("gamma1", "gamma2"), [(1, 0), (10, 10), (0.5, 0.2)])
@pytest.mark.parametrize("images", [3, 50])  # fewer and more than the 9 dimensions
def test_a_covariance_is_shrunk_and_normalised_as_by_hand(images, gamma1, gamma2):
    rows = torch.randn(images, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[:, 1] = 3 * rows[:, 0] + 0.1 * rows[:, 1]
    np.testing.assert_allclose(
        metric(torch.cov(rows.T), gamma1, gamma2), by_hand(rows.numpy(), gamma1, gamma2), atol=1e-12
    )


@pytest.mark.parametrize(("gamma1", "gamma2"), [(1, 0), (10, 5), (10, 10)])
def test_distances_are_scipys(gamma1, gamma2):
    """Of 8 images per class in 24 dimensions. The toy's features sum to zero: (10, 10) is singular."""
    make = Maker(FeCAM, {"gamma1": gamma1, "gamma2": gamma2})
    method = make.after()
    assert isinstance(method, FeCAM)

    def seen(pixels: torch.Tensor) -> np.ndarray:
        return F.normalize(method.backbone.embed_pixels(pixels).double()).numpy()

    expected = []
    test = seen(toy_images(NAMES, per_class=5, seed=90)[0])
    for group in GROUPS:
        train = seen(toy_images(group)[0])
        for i in range(len(group)):
            own = train[8 * i : 8 * i + 8]
            inverse = np.linalg.pinv(by_hand(own, gamma1, gamma2), rcond=1e-9)
            expected.append([mahalanobis(image, own.mean(axis=0), inverse) ** 2 for image in test])
    found = method.distances(torch.from_numpy(test).float())
    np.testing.assert_allclose(found, np.array(expected).T, rtol=1e-3, atol=1e-5)
    answers = method.predict(make.images(method, NAMES))
    assert answers.tolist() == np.argmin(expected, axis=0).tolist()


def test_a_class_of_one_image_is_finite():
    """Its metric is the plain distance, as the nearest mean's."""
    method = FeCAM(toy_backbone(), FeCAM.settings_from({}))
    learn_task(method, GROUPS[1], per_class=1)
    assert torch.equal(method.inverses, torch.eye(24).expand(3, 24, 24))
    queries = F.normalize(method.backbone.embed_pixels(toy_images(GROUPS[1], per_class=5)[0]))
    distances = torch.cdist(queries, method.means).square()
    torch.testing.assert_close(method.distances(queries), distances, rtol=1e-4, atol=1e-5)
