"""A measured step is training.py's own, and the reference has the same gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import pytest
import torch
from torch import Tensor

from protosteer.bench import training
from protosteer.bench.subjects import small
from protosteer.bench.training import Batch, Step, against_naive, late_prompts, naive, ours
from protosteer.data.images import ArrayImages
from protosteer.method import training as product
from protosteer.settings import Settings

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neck's 2048 would take most of the time here."""
    monkeypatch.setattr(training, "Settings", partial(Settings, neck_hidden=32))


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(0)
    return Batch.random(small(depth=4), 20)


def made(make: Callable[..., Step], *arguments: object) -> Step:
    """A step whose random start is always the same."""
    torch.manual_seed(1)
    return make(*arguments)


@pytest.mark.parametrize("from_layer", [1, 3])
def test_our_step_is_that_of_training(monkeypatch: pytest.MonkeyPatch, batch: Batch, from_layer: int) -> None:
    monkeypatch.setattr(product, "batches", lambda count, _: iter([torch.arange(count)]))
    settings = Settings(
        prompt_start="random", prompt_from_layer=from_layer, epochs=1, batch_size=20, neck_hidden=32
    )
    trained = product.train_prompt(
        batch.backbone, ArrayImages(batch.pixels), batch.labels, settings, anchors=batch.anchors, seed=1
    )
    step = made(ours, batch, None, from_layer)
    begin = step.prompt.detach().clone()
    step()
    assert step.prompt.shape == (5 - from_layer, 1, batch.backbone.dim)
    assert not torch.equal(step.prompt, begin)
    assert torch.equal(step.prompt, trained.prompt)


def test_the_reference_has_the_same_gradient(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    images = torch.randn(20, 3, 16, 16)
    for name in ("PillowAugmentation", "Augmentation"):
        monkeypatch.setattr(training, name, lambda _: lambda pixels: images)
    steps = [made(naive, batch), made(ours, batch)]
    for step in steps:
        torch.manual_seed(2)  # of the prototypes' noise
        step()
    wanted, found = (step.prompt.grad for step in steps)
    assert wanted is not None and found is not None and wanted.norm() > 0
    assert (wanted - found).norm() < 1e-4 * wanted.norm()
    for theirs, mine in zip(steps[0].head.parameters(), steps[1].head.parameters(), strict=True):
        assert theirs.grad is not None and mine.grad is not None
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("from_layer", [1, 3])
def test_a_cached_step_sees_what_was_put_into_the_cache(batch: Batch, from_layer: int) -> None:
    torch.manual_seed(3)
    cache = training._fill(batch, from_layer - 1)()
    cached, fresh = made(ours, batch, cache, from_layer), made(ours, batch, None, from_layer)
    torch.manual_seed(3)
    wanted = fresh.embed(fresh.prompt)
    torch.testing.assert_close(cached.embed(cached.prompt), wanted, rtol=0.01, atol=0.01)
    assert not torch.allclose(fresh.embed(fresh.prompt), wanted, rtol=0.01, atol=0.01)  # drawn anew


def test_a_step_against_the_naive_one(batch: Batch) -> None:
    ratio = against_naive("training_step", batch, repeats=1)
    assert ratio.name == "training_step" and ratio.value > 0 and ratio.target == 1.6
    assert [note.split(":")[0] for note in ratio.notes] == ["reference", "ours"]
    assert all(word in ratio.notes[0] for word in ("images/s", "augmentation", "backbone", "AdamW"))


def test_cached_steps_pay_their_share_of_the_cache(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    seconds = {
        "fresh 1": 6.0,
        "fresh 2": 4.0,
        "cached 1": 5.0,
        "cached 2": 2.0,
        "fill 1": 1.5,
        "fill 2": 3.75,
    }
    monkeypatch.setattr(training, "interleaved", lambda sides, _: {name: [seconds[name]] for name in sides})
    ratios = {ratio.name: ratio for ratio in late_prompts(batch, (2,), repeats=1)}
    assert {name: ratio.value for name, ratio in ratios.items()} == pytest.approx(
        {"late_training_k2": 1.5, "cached_training_k1": 6 / 5.4, "cached_training_k2": 6 / 3}
    )
    assert ratios["cached_training_k2"].notes == [
        "300.00 ms an image against 150.00",
        "of ours, 50.00 ms are its share of filling the cache",
    ]


def test_all_ratios_of_the_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "vit_tiny", lambda: small(depth=3))
    for name, value in {"LATE": (2,), "BATCH": 4, "BATCH_NANO": 4}.items():
        monkeypatch.setattr(training, name, value)
    before = torch.get_rng_state()
    ratios = training.run(1)
    assert torch.equal(before, torch.get_rng_state())
    assert [ratio.name for ratio in ratios] == [
        "training_step", "training_step_nano", "late_training_k2", "cached_training_k1", "cached_training_k2",
        "late_training_nano_k2", "cached_training_nano_k1", "cached_training_nano_k2",
    ]  # fmt: skip
    assert "nano" in ratios[1].about


def test_milliseconds_are_the_median_per_image() -> None:
    assert training.milliseconds([0.1, 0.5, 0.2], 4) == pytest.approx(1000 * median([0.1, 0.5, 0.2]) / 4)


def test_labels_and_prototypes_are_those_of_a_tenth_task() -> None:
    batch = Batch.random(small(), 25)
    assert batch.labels.unique().tolist() == list(range(10))
    assert len(batch.anchors.means) == 450
    loss = Step(batch, lambda _: torch.randn(25, batch.backbone.dim))
    loss()
    assert isinstance(next(loss.head.parameters()).grad, Tensor)
