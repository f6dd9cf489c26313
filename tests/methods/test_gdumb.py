"""Nothing of earlier trainings is left; CutMix by hand."""

import pytest
import torch

from protosteer.methods.checks import Maker
from protosteer.methods.gdumb import GDumb, cutmix
from protosteer.methods.testing import GROUPS, toy_images

pytestmark = pytest.mark.slow

MAKE = Maker(GDumb)


def test_only_the_buffer_is_trained_on():
    method = MAKE.after(1)
    train = MAKE.after(2).buffer
    trained, labels = method.training_set(type(train.images)(toy_images(GROUPS[1])[0]), torch.arange(24) // 8 + 2)
    assert len(trained) == len(labels) == len(method.buffer) == 20 and labels.bincount().tolist() == [4] * 5


def test_which_images_of_a_class_are_kept_is_drawn():
    kept = {MAKE.after(1, seed).buffer.pixels.numpy().tobytes() for seed in (0, 1)}
    assert len(kept) == 2


def test_a_box_of_each_image_is_its_partners():
    torch.manual_seed(0)
    shares = []
    for _ in range(50):
        images = torch.rand(5, 3, 12, 16)
        before = images.clone()
        mixed, partners, share = cutmix(images)
        assert torch.equal(images, before) and sorted(partners.tolist()) == [0, 1, 2, 3, 4]
        for i, partner in enumerate(partners.tolist()):
            covered = (mixed[i] == images[partner]).all(dim=0)
            assert (covered | (mixed[i] == images[i]).all(dim=0)).all()
            if partner != i:
                rows, columns = covered.any(dim=1), covered.any(dim=0)
                assert torch.equal(covered, rows[:, None] & columns)  # a box
                assert float(covered.float().mean()) == pytest.approx(share)
        shares.append(share)
    assert min(shares) < 0.1 and max(shares) > 0.6


def test_the_loss_is_shared_by_area():
    method = Maker(GDumb, {"cutmix": 1.0}).after(2)
    images = method.backbone.preprocessing(toy_images([*GROUPS[0], *GROUPS[1]], per_class=1)[0])
    labels = torch.arange(5)
    method.generator.manual_seed(6)
    value, _ = method.loss(images, labels)
    torch.manual_seed(6)
    torch.rand(())  # whether to mix
    mixed, partners, share = cutmix(images)
    expected = 0.0
    for i, image in enumerate(mixed):
        chances = method.head(method.backbone.embed(image[None]))[0].log_softmax(dim=0).detach()
        expected -= float((1 - share) * chances[labels[i]] + share * chances[labels[partners[i]]]) / 5
    assert 0.1 < share < 0.4 and value.item() == pytest.approx(expected, rel=1e-4)
