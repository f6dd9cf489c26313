"""Incremental sums against the ridge of all images at once, and the closed form against really leaving images
out.
"""

import pytest
import torch
import torch.nn.functional as F

from protosteer.methods.checks import Maker
from protosteer.methods.ranpac import LAMBDAS, RanPAC
from protosteer.methods.ridge import loo_errors, spectrum_of
from protosteer.methods.testing import GROUPS, toy_images


def all_at_once(method: RanPAC) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and targets of every image of every task."""
    pixels = torch.cat([toy_images(group)[0] for group in GROUPS])
    labels = [method.classes.index(label) for group in GROUPS for label in toy_images(group)[1]]
    hidden = F.relu(method.backbone.embed_pixels(pixels) @ method.projection).double()
    return hidden, F.one_hot(torch.tensor(labels)).double()


@pytest.mark.parametrize("features", [20, 300])  # fewer and more than the 48 images
def test_task_by_task_equals_the_ridge_of_all_images(features):
    method = Maker(RanPAC, {"features": features, "first_session": "none"}).after()
    hidden, targets = all_at_once(method)
    gram = hidden.T @ hidden
    torch.testing.assert_close(method.factor.T @ method.factor, gram, rtol=1e-6, atol=1e-6 * float(gram.max()))
    assert len(method.factor) <= min(features, len(hidden))
    chosen = LAMBDAS[method.errors.argmin()]
    weights = torch.linalg.solve(gram + chosen * torch.eye(features), hidden.T @ targets)
    torch.testing.assert_close(hidden @ method.weights.double(), hidden @ weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("features", [5, 40])
def test_errors_of_images_left_out_are_those_of_leaving_them_out(features):
    strengths = torch.tensor([0.1, 1.0, 100.0], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    earlier, hidden = (torch.randn(12, features, generator=draw, dtype=torch.float64) for _ in range(2))
    past, targets = (F.one_hot(torch.arange(12) % 3).double() for _ in range(2))
    sums = earlier.T @ past + hidden.T @ targets
    found = loo_errors(hidden, targets, sums, spectrum_of(torch.cat([earlier, hidden])), strengths)
    for ridge, error in zip(strengths, found, strict=True):
        expected = 0.0
        for i in range(12):
            rest = torch.cat([earlier, hidden[:i], hidden[i + 1 :]])
            wanted = torch.cat([past, targets[:i], targets[i + 1 :]])
            weights = torch.linalg.solve(rest.T @ rest + ridge * torch.eye(features), rest.T @ wanted)
            expected += float(((targets[i] - hidden[i] @ weights) ** 2).sum())
        assert float(error) == pytest.approx(expected, rel=1e-6)
