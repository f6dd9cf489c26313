"""SSIAT: the shift of means against a loop, what is trained, and that shifting helps."""

import math

import torch
import torch.nn.functional as F

from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.slca import fit_gaussian
from protosteer.methods.ssiat import RIDGE, SSIAT, shift_means
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images

MAKE = Maker(SSIAT)


def test_means_shift_as_in_a_loop():
    torch.manual_seed(0)
    means, before = 2 * torch.randn(3, 4), 2 * torch.randn(6, 4)
    after = before + torch.randn(6, 4)
    found = shift_means(means, before, after)
    for k in range(3):
        weights = [math.exp(-float((f - means[k]).square().sum()) / 32) + 1e-5 for f in before]
        move = sum(w * (b - a) for w, a, b in zip(weights, before, after, strict=True)) / sum(weights)
        torch.testing.assert_close(found[k], means[k] + move)
    far = torch.full((1, 4), 1e3)  # too far away from all: the mean shift of all images
    torch.testing.assert_close(
        shift_means(far, before, after), far + (after - before).mean(dim=0), rtol=1e-5, atol=1e-3
    )


def test_the_margin_is_taken_from_the_cosine_of_the_own_class():
    """CosFace, written out: the own class competes with its cosine less the margin."""
    method = Maker(SSIAT, {"margin": 0.3, "temperature": 0.05}).after(2)
    method.tasks.pop()  # as while the second task is learned
    images, labels = method.backbone.preprocessing(toy_images(GROUPS[1])[0][::8], method.backbone.device), (2, 3, 4)
    value, embeddings = method.loss(images, torch.tensor(labels))
    expected = []
    for row, label in zip(embeddings.detach(), labels, strict=True):
        cosines = [float(F.cosine_similarity(row, method.head.weight[k].detach(), dim=0)) for k in labels]
        own = math.exp((cosines[label - 2] - 0.3) / 0.05)
        others = sum(math.exp(c / 0.05) for k, c in zip(labels, cosines, strict=True) if k != label)
        expected.append(-math.log(own / (own + others)))
    assert math.isclose(float(value.detach()), sum(expected) / 3, rel_tol=1e-4)


def test_earlier_means_move_and_new_ones_are_those_of_the_adapted_backbone():
    one, two = MAKE.after(1), MAKE.after(2)
    pixels, names = toy_images(GROUPS[1])
    before, after = one.backbone.embed_pixels(pixels), two.backbone.embed_pixels(pixels)
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(two.means[:2], shift_means(one.means, before, after), rtol=1e-4, atol=1e-4)
    for k, name in enumerate(GROUPS[1]):
        own = after[[label == name for label in names]].double()
        mean, factor = fit_gaussian(own, RIDGE)
        torch.testing.assert_close(two.means[2 + k], mean.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(two.factors[2 + k], factor.float(), rtol=1e-3, atol=1e-3)


def test_only_adapters_and_rows_of_the_head_are_trained():
    method, plain = MAKE.after(), toy_backbone()
    weights = dict(plain.vit.named_parameters())
    same = [n for n, p in method.backbone.vit.named_parameters() if n in weights and torch.equal(p, weights[n])]
    assert set(same) == set(weights)
    assert all(bool(adapter.up.weight.any()) for adapter in method.adapters)


def test_the_shifted_mean_is_nearer_to_the_truth():
    """The first task's images, embedded again, tell where its means really went."""
    one, two = MAKE.after(1), MAKE.after(2)
    pixels, names = toy_images(GROUPS[0])
    now = two.backbone.embed_pixels(pixels)
    truth = torch.stack([now[[label == name for label in names]].mean(dim=0) for name in GROUPS[0]])
    assert float((two.means[:2] - truth).norm()) < float((one.means - truth).norm())


def test_later_tasks_have_fewer_epochs_and_logits_are_cosines():
    stages = []
    method = Maker(SSIAT, {"epochs": 3, "later_epochs": 2})()
    for group in GROUPS[:2]:
        learn_task(method, group, on_stage=stages.append)
    training = [stage.training for stage in stages if stage.training]
    assert sorted({progress.epochs for progress in training}) == [2, 3]
    features = torch.randn(4, 24)
    expected = F.cosine_similarity(features[:, None], method.head.weight[None], dim=2) / 0.1
    torch.testing.assert_close(method.logits(features), expected)
