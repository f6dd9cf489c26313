"""Losses of methods that replay, image by image; what they keep; and that it helps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from protosteer.data.augment import Augmentation
from protosteer.data.images import ArrayImages
from protosteer.methods import METHODS
from protosteer.methods.buffer import Buffer
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.derpp import DERpp
from protosteer.methods.finetune_base import Rehearsal
from protosteer.methods.testing import GROUPS, toy_images
from protosteer.streams.base import TrainingTask

pytestmark = pytest.mark.slow

REHEARSING = ["er", "der++", "icarl", "gdumb"]


def maker(name: str, **changes: Any) -> Maker:
    return Maker(METHODS[name], changes)


def batch(method: Rehearsal) -> tuple[Tensor, Tensor]:
    """Images of a task that is about to be learned, and their labels; the head has rows for it."""
    pixels, labels = toy_images(GROUPS[2], per_class=4, seed=5)
    method.head.grow(1)
    return method.backbone.preprocessing(pixels, method.backbone.device), torch.full((len(labels),), 5)


def draw(method: Rehearsal, count: int) -> tuple[Tensor, Tensor]:
    """Images and rows of a random part of the buffer."""
    rows = torch.randperm(len(method.buffer.labels))[:count]
    return Augmentation(method.backbone.preprocessing, "crop")(method.buffer.pixels[rows]), rows


def scores(method: Rehearsal, image: Tensor) -> Tensor:
    return method.head(method.backbone.embed(image[None]))[0].detach()


def surprise(method: Rehearsal, image: Tensor, label: int) -> float:
    """Minus the logarithm of the probability of the label."""
    logits = scores(method, image).double()
    return float(logits.exp().sum().log() - logits[label])


def test_er_learns_from_the_task_and_as_many_old_images_alike():
    method = maker("er").after(2)
    images, labels = batch(method)
    method.generator.manual_seed(3)
    value, embeddings = method.loss(images, labels)
    torch.manual_seed(3)
    views, rows = draw(method, 4)
    each = [surprise(method, image, 5) for image in images]
    each += [surprise(method, v, int(method.buffer.labels[r])) for v, r in zip(views, rows, strict=True)]
    assert len(each) == 8 and value.item() == pytest.approx(sum(each) / 8, rel=1e-5)
    torch.testing.assert_close(embeddings, method.backbone.embed(images))


def test_derpp_adds_the_drift_of_logits_and_another_draw():
    method = maker("der++", alpha=0.7, beta=0.2).after(2)
    assert isinstance(method, DERpp)
    images, labels = batch(method)
    with torch.no_grad():  # somewhere on the way through the task
        method.head.weight += 0.1 * torch.randn(method.head.weight.shape)
    method.generator.manual_seed(3)
    value, _ = method.loss(images, labels)
    torch.manual_seed(3)
    (views, rows), (others, which) = draw(method, 4), draw(method, 4)
    own = sum(surprise(method, image, 5) for image in images) / 4
    squares = []
    for view, row in zip(views, rows, strict=True):
        logits, kept = scores(method, view), method.buffer.notes["logits"][row]
        there = 2 if int(method.buffer.labels[row]) < 2 else 5  # classes when the image came
        squares += [float(logits[k] - kept[k]) ** 2 for k in range(there)]
    again = [surprise(method, v, int(method.buffer.labels[r])) for v, r in zip(others, which, strict=True)]
    expected = own + 0.7 * sum(squares) / len(squares) + 0.2 * sum(again) / 4
    assert 8 < len(squares) < 20  # images of both tasks
    assert value.item() == pytest.approx(expected, rel=1e-5)


def test_derpp_keeps_what_the_network_said_at_the_end_of_the_images_own_task():
    make = maker("der++", buffer_size=12)
    first, later = make.after(1), make.after(3)
    logits, labels = later.buffer.notes["logits"], later.buffer.labels
    for row in (labels < 2).nonzero()[:, 0].tolist():
        then = first.head(first.backbone.embed_pixels(later.buffer.pixels[row : row + 1]))[0]
        torch.testing.assert_close(logits[row, :2], then.detach(), rtol=1e-4, atol=1e-4)
    known = (~logits.isnan()).sum(dim=1)
    assert torch.equal(known, torch.tensor([2, 2, 5, 5, 5, 6])[labels]) and logits.shape[1] == 6


@pytest.mark.parametrize("name", ["er", "der++"])
def test_with_nothing_to_replay_it_is_finetuning(name):
    mine = maker(name).after(1)
    plain = Maker(METHODS["finetune"], {"epochs": METHODS[name].test_settings["epochs"]}).after(1)
    for key, parameter in plain.parameters().items():
        assert torch.equal(parameter, mine.parameters()[key]), key


def test_every_image_is_kept_with_the_same_probability():
    """24 images in three tasks, 6 places: each is kept in a quarter of 400 trials."""
    torch.manual_seed(0)
    counts = torch.zeros(24)
    method = maker("er", buffer_size=6)()
    for _ in range(400):
        method.buffer = Buffer()
        for part in torch.arange(24).split([5, 12, 7]):
            pixels = part.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 1, 1)
            task = TrainingTask("some", ["a"], ArrayImages(pixels), ["a"] * len(part))
            method.end_task(task, part)
            assert len(method.buffer) <= 6
        assert torch.equal(method.buffer.pixels[:, 0, 0, 0].long(), method.buffer.labels)
        counts[method.buffer.labels] += 1
    deviation = (400 * 0.25 * 0.75) ** 0.5
    assert (counts - 100).abs().max() < 4.5 * deviation, counts


@pytest.mark.parametrize("name", REHEARSING)
def test_buffers_keep_to_their_size_and_their_own_pictures(name):
    method = maker(name, epochs=1, buffer_size=13)()
    seen: dict[bytes, int] = {}
    for i, group in enumerate(GROUPS):
        pixels, labels = toy_images(group, per_class=9)
        learn_task(method, group, per_class=9)
        numbers = [method.classes.index(label) for label in labels]
        seen |= {p.numpy().tobytes(): k for p, k in zip(pixels, numbers, strict=True)}
        kept = [seen[p.numpy().tobytes()] for p in method.buffer.pixels]
        assert kept == method.buffer.labels.tolist()
        counts = sorted(method.buffer.labels.bincount().tolist(), reverse=True)
        expected = {
            "icarl": [[6, 6], [2] * 5, [2] * 6],  # 13 // 2, 13 // 5, 13 // 6
            "gdumb": [[7, 6], [3, 3, 3, 2, 2], [3, 2, 2, 2, 2, 2]],
        }
        assert counts == expected[name][i] if name in expected else sum(counts) == 13


@pytest.mark.parametrize("name", ["joint", "gdumb"])
def test_a_network_that_is_retrained_does_not_depend_on_earlier_trainings(name):
    make = Maker(METHODS[name])
    whole, spoilt, fresh = make.after(3), make.after(2), make()
    fresh.tasks = list(spoilt.tasks)
    fresh.buffer.load_state_dict(spoilt.buffer.state_dict())
    with torch.no_grad():
        for parameter in spoilt.parameters().values():
            parameter.copy_(torch.randn(parameter.shape))
    for method in (fresh, spoilt):
        learn_task(method, GROUPS[2])
        assert method.state() == whole.state()
