"""Gaussians against numpy's, normalised logits against a loop, and a head that alignment must mend."""

import math

import numpy as np
import pytest
import torch

from protosteer.methods.checks import Maker
from protosteer.methods.slca import SLCA, fit_gaussian
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images
from protosteer.methods.training_utils import scheduled_rate


def planted(**settings: float) -> SLCA:
    """Knows three tasks of well-separated classes by their Gaussians; its head has learned nothing."""
    method = SLCA(toy_backbone(), SLCA.settings_from(settings))
    method.tasks = [list(group) for group in GROUPS]
    torch.manual_seed(0)
    method.means = 2 * torch.randn(6, 24)
    method.factors = torch.randn(6, 24, 24).tril() / 5
    method.head.grow(6)
    return method


@pytest.mark.parametrize("images", [1, 5, 100])  # fewer and more than the 9 dimensions
def test_a_class_is_kept_as_numpys_mean_and_covariance(images):
    rows = torch.randn(images, 9, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1, 10)
    mean, factor = fit_gaussian(rows)
    covariance = np.cov(rows.numpy().T) if images > 1 else np.zeros((9, 9))
    np.testing.assert_allclose(mean, rows.numpy().mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(factor @ factor.T, covariance + 1e-4 * np.eye(9), atol=1e-10)
    assert torch.equal(factor, factor.tril())


def test_statistics_are_of_the_backbone_after_its_task():
    method = Maker(SLCA).after(2)
    assert isinstance(method, SLCA)
    embeddings = method.backbone.embed_pixels(toy_images(GROUPS[1])[0]).double().numpy()
    for i in range(3):
        own = embeddings[8 * i : 8 * i + 8]
        factor = method.factors[2 + i].double()
        np.testing.assert_allclose(method.means[2 + i], own.mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(factor @ factor.T, np.cov(own.T) + 1e-4 * np.eye(24), atol=1e-4)


def test_what_is_drawn_has_the_moments_of_its_class():
    method = planted(align_draws=20_000)
    drawn = method.draw().view(6, 20_000, 24)
    for number, share in enumerate([1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1]):
        mean, factor = method.means[number] * (0.9 + 0.1 * share), method.factors[number]
        torch.testing.assert_close(drawn[number].mean(dim=0), mean, rtol=0, atol=0.05)
        torch.testing.assert_close(drawn[number].T.cov(), factor @ factor.T, rtol=0, atol=0.1)


def test_logits_are_normalised_as_in_a_loop():
    method = planted(temperature=0.3)
    logits = torch.randn(4, 6)
    found = method.normalise(logits)
    for row, scaled in zip(logits.tolist(), found.tolist(), strict=True):
        parts = [row[:2], row[2:5], row[5:]]
        norm = sum(math.sqrt(sum(x * x for x in part)) for part in parts) / 3
        assert scaled == pytest.approx([x / norm / 0.3 for x in row], rel=1e-4)


def test_alignment_mends_a_head_that_favours_the_last_task():
    method = planted()
    with torch.no_grad():
        method.head.bias[5] += 6
    features, truth = method.draw(), torch.arange(6).repeat_interleave(256)

    def accuracy() -> float:
        return float((method.head(features).argmax(dim=1) == truth).float().mean())

    assert accuracy() == pytest.approx(1 / 6, abs=0.02)
    method.align()
    assert accuracy() > 0.9


def test_the_next_task_goes_on_with_the_head_before_alignment():
    make = Maker(SLCA)
    one, two, three = make.after(1), make.after(2), make.after(3)
    assert torch.equal(one.head.weight, one.trained.weight)  # nothing to align yet
    assert torch.equal(two.trained.weight[:2], one.trained.weight)
    assert torch.equal(three.trained.bias[:5], two.trained.bias)
    assert not torch.equal(two.head.weight, two.trained.weight)


def test_the_backbone_learns_slowly():
    method = planted(learning_rate=0.02, backbone_rate=0.25)
    slow, head = method.optimiser().param_groups
    assert slow["lr"] == pytest.approx(0.005) and head["lr"] == 0.02
    assert sum(p.numel() for p in slow["params"]) == method.backbone.parameters
    assert [p.shape for p in head["params"]] == [(6, 24), (6,)]


def test_rates_fall_to_a_tenth_at_the_authors_milestone():
    """Epoch 18 of 20, whatever the number of steps."""
    step_settings, settings = SLCA.settings_from({}), SLCA.settings_from({"schedule": "constant"})
    rates = [scheduled_rate(step_settings, step, 20 * 7, 0.01) for step in range(20 * 7)]
    assert rates == [0.01] * 18 * 7 + [0.001] * 2 * 7
    assert scheduled_rate(settings, 139, 140, 0.01) == 0.01
