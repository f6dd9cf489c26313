"""A planted bias is found, the loss is the paper's, and what is held out is never trained on."""

import pytest
import torch
import torch.nn.functional as F

from protosteer.methods.bic import BiC, correct, draw_held_out, fit_bias, rows_to_keep
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.finetune_base import distillation
from protosteer.methods.testing import GROUPS, toy_images


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, -2.0), (1.0, 0.0), (1.6, 1.0)])
def test_a_planted_bias_is_undone(alpha, beta):
    """Labels follow the softmax of true logits; those of three new classes are then distorted."""
    draw = torch.Generator().manual_seed(0)
    true = 2 * torch.randn(20_000, 7, generator=draw)
    labels = torch.multinomial(true.softmax(dim=1), 1, generator=draw)[:, 0]
    seen = true.clone()
    seen[:, -3:] = (true[:, -3:] - beta) / alpha
    found = fit_bias(seen, labels, new_count=3)
    torch.testing.assert_close(found, torch.tensor([alpha, beta]), rtol=0.05, atol=0.05)
    torch.testing.assert_close(correct(seen, torch.tensor([alpha, beta]), 3), true)


def test_the_bias_of_images_that_are_told_apart_perfectly_is_finite():
    logits = 5 * torch.eye(4).repeat(2, 1)
    assert bool((fit_bias(logits, torch.arange(4).repeat(2), new_count=2).abs() < 20).all())


def test_distillation_weighs_as_much_as_old_classes_among_all():
    method = Maker(BiC).after(2)
    method.begin_task(None, torch.tensor([5]))
    method.head.grow(1)
    method.correction = torch.tensor([0.7, -0.3])
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([5, 0, 3, 5])
    logits = method.head(method.backbone.embed(images))
    wanted = method.teacher(images)
    wanted[:, 2:5] = 0.7 * wanted[:, 2:5] - 0.3  # the second task's classes
    old = distillation(logits[:, :5], wanted, 2.0)
    expected = 5 / 6 * old + 1 / 6 * F.cross_entropy(logits, labels)
    torch.testing.assert_close(method.loss(images, labels)[0], expected)


def test_the_latest_classes_are_predicted_corrected():
    make = Maker(BiC)
    method = make.after(2)
    images = make.images(method, GROUPS[0])
    method.correction = torch.tensor([1.0, 1e3])
    assert int(method.predict(images).min()) >= 2
    method.correction = torch.tensor([1.0, -1e3])
    assert int(method.predict(images).max()) < 2


def test_every_class_has_images_held_out_and_the_same_number_of_them():
    torch.manual_seed(0)
    labels = torch.tensor([0] * 100 + [1] * 60 + [2] * 3 + [3])
    held = draw_held_out(labels, 0.1, quota=50)
    assert labels[held].bincount(minlength=4).tolist() == [5, 5, 1, 0]
    rows = rows_to_keep(labels, held, 0.1, size=40)
    kept = torch.zeros(len(labels), dtype=torch.bool)
    kept[rows] = True
    assert len(rows) == 40 and labels[kept & held].bincount().tolist() == [2, 1, 1]
    assert labels[kept & ~held].bincount().tolist() == [17, 16, 2, 1]


def test_what_is_held_out_is_never_trained_on():
    method = Maker(BiC)()
    aside: list[torch.Tensor] = []
    for group in GROUPS:
        trained: list[torch.Tensor] = []
        usual = method.training_set

        def seen(images, labels, usual=usual, trained=trained):
            found = usual(images, labels)
            trained.append(found[0].pixels(range(len(found[0]))))
            return found

        method.training_set = seen
        before = method.buffer.pixels[method.buffer.notes["held"]] if len(method.buffer) else []
        learn_task(method, group)
        fresh = toy_images(group)[0][method.held]
        aside += [*before, *fresh]
        assert len(fresh) >= len(group) and not any(torch.equal(a, b) for a in aside for b in trained[0])
        method.training_set = usual
    assert len(method.buffer.labels[method.buffer.notes["held"]].unique()) == 6  # one of each class
