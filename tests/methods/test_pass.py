"""Rotations, radius and losses of PASS, each against the same by hand."""

import math

import numpy as np
import pytest
import torch

from protosteer.methods.checks import Maker
from protosteer.methods.pass_ import PASS, radius, rotate
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images, toy_task


def cross_entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(x) for x in logits)) - logits[label]


def test_rotated_images_have_rows_of_their_own():
    images = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)
    views, rows = rotate(images, torch.tensor([0, 5]))
    assert rows.tolist() == [0, 20, 1, 21, 2, 22, 3, 23]
    for i, view in enumerate(views):
        turned = np.stack([np.rot90(channel, i // 2) for channel in images[i % 2].numpy()])
        np.testing.assert_array_equal(view, turned)


def test_the_radius_is_that_of_numpys_covariances():
    draw = torch.Generator().manual_seed(0)
    classes = [torch.randn(n, 7, generator=draw, dtype=torch.float64) * n for n in (3, 20)]
    expected = math.sqrt(np.mean([np.trace(np.cov(some.numpy().T)) / 7 for some in classes]))
    assert float(radius(classes)) == pytest.approx(expected, rel=1e-12) and float(radius([torch.ones(1, 7)])) == 0


def test_what_is_kept_is_of_each_task_and_the_radius_of_the_first():
    make = Maker(PASS)
    one, two = make.after(1), make.after(2)
    assert isinstance(one, PASS) and isinstance(two, PASS)
    embeddings = one.backbone.embed_pixels(toy_images(GROUPS[0])[0]).view(2, 8, 24)
    torch.testing.assert_close(one.prototypes, embeddings.mean(dim=1))
    assert float(one.radius) == pytest.approx(float(radius(list(embeddings))), rel=1e-5)
    assert two.radius == one.radius and torch.equal(two.prototypes[:2], one.prototypes)
    assert two.head.weight.shape == (4 * 5, 24) and two.teacher is None


def test_drawn_prototypes_lie_around_those_kept():
    method = Maker(PASS).after(2)
    method.radius = torch.tensor(0.5)
    torch.manual_seed(0)
    moved, owners = method.draw(20_000)
    assert (owners.bincount(minlength=5) / 20_000).tolist() == pytest.approx([0.2] * 5, abs=0.02)
    noise = moved - method.prototypes[owners]
    assert float(noise.mean()) == pytest.approx(0, abs=0.01) and float(noise.std()) == pytest.approx(0.5, abs=0.01)


def test_losses_are_those_of_loops():
    """Of the second task, with weights and a temperature that tell the three apart."""
    settings = {"batch_size": 5, "distill_weight": 3.0, "prototype_weight": 7.0, "temperature": 0.7}
    method = PASS(toy_backbone(), PASS.settings_from(settings))
    torch.manual_seed(0)
    method.tasks, method.prototypes = [["ant", "bee"]], torch.randn(2, 24)
    method.radius = torch.tensor(0.3)
    method.head.grow(8)
    task = toy_task(GROUPS[1])
    labels = torch.tensor([2, 3, 4])
    method.begin_task(task, labels)
    method.head.grow(3)
    with torch.no_grad():
        for parameter in method.backbone.vit.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
    images = torch.randn(3, 3, 16, 16)
    method.generator.manual_seed(1)
    with torch.no_grad():
        found, features = method.loss(images, labels)
    assert features.shape == (3, 24)
    surprises, squares = [], 0.0
    for image, label in zip(images, labels.tolist(), strict=True):
        for turn in range(4):
            view = torch.rot90(image, turn, (1, 2))[None]
            now, then = method.backbone.embed(view), method.teacher.backbone.embed(view)
            surprises.append(cross_entropy((method.head(now)[0] / 0.7).tolist(), 4 * label + turn))
            squares += float((now - then).detach().square().sum())
    method.generator.manual_seed(1)
    moved, owners = method.draw(5)
    logits = (method.head(moved) / 0.7).tolist()
    old = [cross_entropy(row, 4 * owner) for row, owner in zip(logits, owners.tolist(), strict=True)]
    expected = np.mean(surprises) + 3 * math.sqrt(squares) + 7 * np.mean(old)
    assert float(found) == pytest.approx(expected, rel=1e-4) and squares > 0


def test_the_first_step_of_a_task_has_a_gradient():
    """The network is where it was, and a distance of zero has none of its own."""
    method = Maker(PASS).after(1)
    method.begin_task(toy_task(GROUPS[1]), torch.tensor([2, 3, 4]))
    method.head.grow(3)
    method.loss(torch.randn(3, 3, 16, 16), torch.tensor([2, 3, 4]))[0].backward()
    assert all(p.grad.isfinite().all() for p in method.parameters().values())
