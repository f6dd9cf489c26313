"""Distillation against a loop, and what it holds."""

import math

import pytest
import torch
import torch.nn.functional as F

from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.finetune import Finetune
from protosteer.methods.finetune_base import Teacher, distillation
from protosteer.methods.lwf import LwF
from protosteer.methods.testing import GROUPS, toy_images


def softened(logits: list[float], temperature: float) -> list[float]:
    """Probabilities to the power 1 / T, divided by their sum: the form of Li and Hoiem."""
    whole = sum(math.exp(x) for x in logits)
    powers = [(math.exp(x) / whole) ** (1 / temperature) for x in logits]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_distillation_is_the_cross_entropy_of_softened_probabilities(temperature):
    torch.manual_seed(0)
    logits, teacher = torch.randn(6, 4) * 3, torch.randn(6, 4) * 3
    expected = 0.0
    for own, wanted in zip(logits.tolist(), teacher.tolist(), strict=True):
        pairs = zip(softened(wanted, temperature), softened(own, temperature), strict=True)
        expected -= sum(p * math.log(q) for p, q in pairs) / 6
    torch.testing.assert_close(float(distillation(logits, teacher, temperature)), expected)


def test_a_network_that_agrees_with_its_teacher_is_not_moved():
    logits = (torch.arange(12.0).view(3, 4) % 5).requires_grad_()
    distillation(logits, logits.detach(), 2.0).backward()
    assert float(logits.grad.abs().max()) < 1e-7


def test_a_teacher_stays_as_the_network_was():
    method = Maker(LwF).after(1)
    images = torch.randn(3, 3, 16, 16)
    teacher, before = Teacher(method.backbone, method.head), method.head(method.backbone.embed(images))
    learn_task(method, GROUPS[1])
    torch.testing.assert_close(teacher(images), before.detach())
    assert not teacher(images).requires_grad


def test_the_loss_is_of_all_classes_and_the_old_ones_again():
    method = Maker(LwF, {"distillation_weight": 3.0}).after(1)
    method.begin_task(None, None)
    method.head.grow(3)
    with torch.no_grad():
        method.head.weight.mul_(1.5)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([2, 3, 4, 2])
    logits = method.head(method.backbone.embed(images))
    old = distillation(logits[:, :2], method.teacher(images), 2.0)
    expected = F.cross_entropy(logits, labels) + 3.0 * old
    torch.testing.assert_close(method.loss(images, labels)[0], expected)


def test_old_answers_to_new_images_change_less_than_by_fine_tuning():
    """In the Kullback-Leibler divergence of what is said of the old classes."""
    pixels, drift = toy_images(GROUPS[1])[0], {}
    for kind in (Finetune, LwF):
        method = Maker(kind).after(1)
        before = method.head(method.backbone.embed_pixels(pixels)).detach().log_softmax(dim=1)
        learn_task(method, GROUPS[1])
        after = method.head(method.backbone.embed_pixels(pixels)).detach()[:, :2].log_softmax(dim=1)
        drift[kind] = float(F.kl_div(after, before, reduction="batchmean", log_target=True))
    assert drift[LwF] < 0.5 * drift[Finetune], drift
