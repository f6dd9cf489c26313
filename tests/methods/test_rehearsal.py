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
from protosteer.methods.finetune import Finetune
from protosteer.methods.finetune_base import Rehearsal
from protosteer.methods.joint import Joint
from protosteer.methods.testing import GROUPS, toy_images
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import Stage

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


def test_derpp_stores_the_logits_of_the_moment():
    """Those of the step that offered the image, under the weights before the step's update."""
    method, said = maker("der++", buffer_size=12, augmentation="none")(), []
    plain = method.loss

    def loss(images, labels):
        logits = method.head(method.backbone.embed(images)).detach()
        said.extend(zip(labels.tolist(), logits, strict=True))
        return plain(images, labels)

    method.loss = loss
    for group in GROUPS:
        learn_task(method, group)
    logits, labels = method.buffer.notes["logits"], method.buffer.labels
    for stored, label in zip(logits, labels.tolist(), strict=True):
        known = stored[~stored.isnan()]
        moments = [z for k, z in said if k == label and len(z) == len(known)]
        assert any(torch.allclose(known, z, atol=1e-5) for z in moments)
    counts = (~logits.isnan()).sum(dim=1)
    assert torch.equal(counts, torch.tensor([2, 2, 5, 5, 5, 6])[labels]) and logits.shape[1] == 6


@pytest.mark.parametrize("name", ["er", "der++"])
def test_the_current_task_is_replayed(name):
    method, lengths = maker(name)(), []
    plain = method.replay
    method.replay = lambda count: lengths.append(len(method.buffer)) or plain(count)
    learn_task(method, GROUPS[0])
    assert lengths[0] == 8 and max(lengths) == 20 and method.buffer.offered == 16 * method.settings.epochs


@pytest.mark.parametrize("name", ["er", "der++"])
def test_an_interrupted_first_task_resumes_with_its_buffer(name, tmp_path):
    """The new learner's buffer is empty when its training is resumed."""
    make, checkpoint = maker(name), CheckpointFile(tmp_path / "checkpoint", seconds=0)

    def stop(stage: Stage) -> None:
        if stage.training and stage.training.step == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        learn_task(make(), GROUPS[0], on_stage=stop, checkpoint=checkpoint)
    learner = make()
    learn_task(learner, GROUPS[0], checkpoint=checkpoint)
    assert learner.state() == make.after(1).state()


def test_every_image_is_kept_with_the_same_probability():
    """24 images in steps of several sizes, 6 places: each is kept in a quarter of 400 trials."""
    torch.manual_seed(0)
    counts, images = torch.zeros(24), ArrayImages(torch.arange(24).byte().view(-1, 1, 1, 1).expand(-1, 3, 1, 1))
    for _ in range(400):
        buffer = Buffer()
        for rows in torch.arange(24).split([4, 5, 12, 3]):
            buffer.sample(images, rows, rows, 6, twice=2.0 * rows[:, None])
            assert len(buffer) == min(6, buffer.offered)
        assert torch.equal(buffer.pixels[:, 0, 0, 0].long(), buffer.labels)
        assert torch.equal(buffer.notes["twice"][:, 0], 2.0 * buffer.labels)
        counts[buffer.labels] += 1
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


def test_joint_training_keeps_every_image_with_its_label():
    method = Maker(Joint).after()
    pixels = torch.cat([toy_images(group)[0] for group in GROUPS])
    labels = [method.classes.index(label) for group in GROUPS for label in toy_images(group)[1]]
    assert torch.equal(method.buffer.pixels, pixels) and method.buffer.labels.tolist() == labels


def test_joint_training_on_a_single_task_is_fine_tuning():
    joint, plain = (Maker(method, {**Joint.test_settings, "schedule": "cosine"})() for method in (Joint, Finetune))
    for method in (joint, plain):
        learn_task(method, [name for group in GROUPS for name in group])
    assert all(torch.equal(p, plain.parameters()[name]) for name, p in joint.parameters().items())
