from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import easy_task, tiny_backbone
from protosteer.bench.subjects import small
from protosteer.data.augment import Augmentation
from protosteer.data.images import ArrayImages
from protosteer.errors import TrainingError
from protosteer.method import losses
from protosteer.method.anchors import Anchors
from protosteer.method.training import (
    Head,
    batches,
    initial_prompt,
    learning_rate,
    train_prompt,
    weight_decay,
)
from protosteer.settings import Settings

QUICK = Settings(epochs=4, batch_size=8, neck_hidden=16, augmentation="crop")


def task(classes: int = 2, per_class: int = 8) -> tuple[ArrayImages, torch.Tensor]:
    names = [f"class {i}" for i in range(classes)]
    images, labels = easy_task(names, per_class)
    return ArrayImages(images), torch.tensor([names.index(label) for label in labels])


def anchors(count: int = 6) -> Anchors:
    means = torch.randn(count, 24, generator=torch.Generator().manual_seed(5))
    return Anchors(means, torch.full((count, 24), 0.1), torch.arange(count))


def test_training_changes_the_prompt_and_nothing_else():
    backbone = tiny_backbone()
    before = {name: tensor.clone() for name, tensor in backbone.vit.state_dict().items()}
    trained = train_prompt(backbone, *task(), QUICK)
    assert trained.prompt.shape == (2, 1, 24) and trained.prompt.abs().max() > 1e-4
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.vit.state_dict().items())
    assert all(parameter.grad is None for parameter in backbone.vit.parameters())


def test_training_lowers_the_loss_and_pulls_classes_apart():
    settings = QUICK.replace(epochs=25, batch_size=16, augmentation="none", learning_rate=5e-3)
    trained = train_prompt(tiny_backbone(), *task(3), settings)
    assert trained.epochs[-1].loss < trained.epochs[0].loss - 0.1
    assert len(trained.epochs) == 25


def test_same_seed_same_bits_and_the_callers_random_state_is_kept():
    backbone, data = tiny_backbone(), task()
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = train_prompt(backbone, *data, QUICK, anchors=anchors(), seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again = train_prompt(backbone, *data, QUICK, anchors=anchors(), seed=1)
    other = train_prompt(backbone, *data, QUICK, anchors=anchors(), seed=2)
    assert torch.equal(first.prompt, again.prompt)
    assert not torch.equal(first.prompt, other.prompt)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "supcon"},
        {"loss": "cross-entropy"},
        {"uniformity": True},
        {"prototypes_per_step": 0},
        {"prototypes_per_step": 3},
        {"anchor_rows": "images+prototypes"},
        {"neck_layers": 1},
        {"prompt_kind": "shallow"},
        {"prompt_length": 4},
        {"prompt_start": "random"},
        {"prompt_start": "zero"},
    ],
    ids=str,
)
def test_every_alternative_trains_and_makes_a_difference(change):
    start = torch.full((2, 1, 24), 0.3)
    backbone, data = tiny_backbone(), task()
    settings = QUICK.replace(**change)
    kind = settings.prompt_kind, settings.prompt_length
    default = train_prompt(backbone, *data, QUICK, start=start, anchors=anchors())
    other = train_prompt(
        backbone, *data, settings, start=start if kind == ("deep", 1) else None, anchors=anchors()
    )
    assert torch.isfinite(other.prompt).all()
    assert other.prompt.shape != default.prompt.shape or not torch.equal(other.prompt, default.prompt)


def test_progress_counts_every_step_to_the_end():
    seen = []
    train_prompt(tiny_backbone(), *task(), QUICK, on_step=seen.append)
    assert [p.step for p in seen] == list(range(1, 9)) and seen[-1].steps == 8
    assert seen[-1].seconds_left == 0 and seen[0].accuracy is None and seen[-1].accuracy is not None
    assert (seen[-1].epoch, seen[-1].epochs) == (4, 4)


@pytest.mark.parametrize(("classes", "per_class"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_small_tasks_train(classes, per_class):
    trained = train_prompt(tiny_backbone(), *task(classes, per_class), QUICK, anchors=anchors())
    assert torch.isfinite(trained.prompt).all()


def test_a_loss_that_is_not_finite_stops_training(monkeypatch):
    monkeypatch.setattr(losses, "cpl", lambda z, *rest: z.sum() * float("nan"))
    with pytest.raises(TrainingError, match="became nan in epoch 1, step 1; lower learning_rate"):
        train_prompt(tiny_backbone(), *task(), QUICK)


def test_last_short_batch_is_dropped_only_when_there_is_a_full_one():
    assert [len(rows) for rows in batches(10, 4)] == [4, 4]
    assert [len(rows) for rows in batches(8, 4)] == [4, 4]
    assert [len(rows) for rows in batches(3, 4)] == [3]
    assert sorted(torch.cat(list(batches(8, 4))).tolist()) == list(range(8))


def test_schedules_start_and_end_where_the_paper_says():
    settings = Settings()
    steps = 50 * 20
    rates = [learning_rate(step, steps, settings) for step in range(steps)]
    assert max(rates) == pytest.approx(1e-3) and rates.index(max(rates)) == 99  # 5 epochs of warm-up
    assert rates[0] == pytest.approx(1e-5) and rates[-1] == pytest.approx(1e-6)
    assert all(a > b for a, b in zip(rates[100:], rates[101:], strict=False))
    decays = [weight_decay(step, steps, settings) for step in range(steps)]
    assert decays[0] == pytest.approx(5e-4) and decays[-1] == pytest.approx(1e-2)
    assert learning_rate(0, 1, Settings(epochs=1)) == pytest.approx(1e-3)


def test_warm_up_is_a_tenth_of_a_short_training():
    settings = Settings(epochs=10)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates.index(max(rates)) == 9


def test_neck_is_the_papers():
    head = Head(192, 10, Settings())
    linears = [layer for layer in head.neck if isinstance(layer, torch.nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linears] == [
        (192, 2048),
        (2048, 2048),
        (2048, 192),
    ]
    assert all(not layer.bias.any() for layer in linears)
    assert linears[1].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert len(Head(192, 10, Settings(neck_layers=1)).neck) == 1


def test_head_samples_as_many_prototypes_as_images():
    drawn = []

    class Counting(Anchors):
        def sample(self, count):
            drawn.append(count)
            return super().sample(count)

    source = anchors()
    counting = Counting(source.means, source.scales, source.labels)
    embeddings = F.normalize(torch.randn(7, 24), dim=1)
    Head(24, 2, QUICK).loss(embeddings, torch.arange(7) % 2, counting)
    Head(24, 2, QUICK.replace(prototypes_per_step=11)).loss(embeddings, torch.arange(7) % 2, counting)
    Head(24, 2, QUICK.replace(prototypes_per_step=0)).loss(embeddings, torch.arange(7) % 2, counting)
    assert drawn == [7, 11]


def test_prompt_starts():
    backbone, previous = tiny_backbone(), torch.ones(2, 1, 24)
    assert not initial_prompt(backbone, Settings(), None).any()
    assert torch.equal(initial_prompt(backbone, Settings(), previous), previous)
    assert not initial_prompt(backbone, Settings(prompt_start="zero"), previous).any()
    random = initial_prompt(backbone, Settings(prompt_start="random"), previous)
    assert 0 < random.abs().max() < 0.1


def test_training_equals_a_plain_loop_that_runs_every_layer():
    """The twin knows no trunk: whole images go through the whole backbone, late prompt or not."""
    backbone, (images, labels) = small(depth=4), task()
    for layer in (1, 3):
        settings = QUICK.replace(prompt_from_layer=layer, epochs=3, batch_size=16, warmup_fraction=0.0,
                                 weight_decay=0.0, final_weight_decay=0.0, final_learning_rate=1e-3,
                                 gradient_clip=1e9)  # fmt: skip
        trained = train_prompt(backbone, images, labels, settings, seed=5)

        torch.manual_seed(5)
        prompt = torch.nn.Parameter(initial_prompt(backbone, settings, None))
        head = Head(backbone.dim, 2, settings)
        augment = Augmentation(backbone.preprocessing, settings.augmentation)
        optimiser = torch.optim.AdamW([prompt, *head.parameters()], lr=1e-3, weight_decay=0.0)
        for _ in range(3):
            order = torch.randperm(16)
            loss = head.loss(backbone.embed(augment(images.pixels(order)), prompt), labels[order], None)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert trained.prompt.abs().max() > 1e-4
        torch.testing.assert_close(trained.prompt, prompt.detach(), atol=1e-6, rtol=0)
