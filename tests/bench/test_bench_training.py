"""A measured step is method/training.py's own, and the reference does the same in another way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from conftest import train
from protosteer.bench import training
from protosteer.bench.subjects import pictures, small
from protosteer.bench.training import Batch, Step, concatenating, measure, naive, ours, pillow_augmentation
from protosteer.data.augment import Augmentation
from protosteer.data.transforms import Preprocessing
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
    more = {"prototypes": batch.prototypes, "seed": 1}
    trained = train(batch.backbone, batch.pixels, batch.labels, settings, **more)
    step = made(ours, batch, from_layer)
    begin = step.prompt.detach().clone()
    step()
    assert step.prompt.shape == (5 - from_layer, 1, batch.backbone.dim)
    assert not torch.equal(step.prompt, begin)
    assert torch.equal(step.prompt, trained.prompt)


def test_the_reference_has_the_same_gradient(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    images = torch.randn(20, 3, 16, 16)
    for name in ("pillow_augmentation", "Augmentation"):
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


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_the_concatenating_forward_equals_ours(pool: str) -> None:
    backbone = small(pool=pool)
    images = backbone.preprocessing(pictures(backbone, 4))
    prompt = torch.randn(backbone.prompt_shape(2))
    torch.testing.assert_close(concatenating(backbone.vit, images, prompt), backbone.embed(images, prompt))


def test_pillow_does_what_we_do() -> None:
    """The same choices, drawn from one seed; other choices are seen, so that the agreement is none by chance."""
    levels = Preprocessing(48, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    smooth = torch.rand((24, 3, 5, 5), generator=torch.Generator().manual_seed(0)) * 220
    pixels = torch.nn.functional.interpolate(smooth, size=(60, 60), mode="bicubic").clamp(0, 220).byte()
    torch.manual_seed(3)
    pillow = pillow_augmentation(levels)(pixels)
    for seed, agrees in ((3, True), (4, False)):
        torch.manual_seed(seed)
        apart = (pillow - Augmentation(levels)(pixels)).abs().mean((1, 2, 3))
        assert bool(apart.max() < 0.012) is agrees


def test_ratios_are_of_the_steps_that_they_name(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    seconds = {"naive": 9.0, "k1": 6.0, "k2": 4.0}
    monkeypatch.setattr(training, "interleaved", lambda sides, _: {name: [seconds[name]] for name in sides})
    step, late = measure(batch, (2,), 1)
    assert (step.value, step.target, late.value, late.target) == (1.5, 1.6, 1.5, 1.0)
    assert step.notes == ["450.00 ms an image against 300.00"]
    assert late.notes == ["300.00 ms an image against 200.00"]


def test_all_ratios_of_the_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "vit_tiny", lambda: small(depth=3))
    for name, value in {"LATE": (2,), "BATCH": 4, "BATCH_NANO": 4}.items():
        monkeypatch.setattr(training, name, value)
    before = torch.get_rng_state()
    ratios = training.run(1)
    assert torch.equal(before, torch.get_rng_state())
    assert [ratio.name for ratio in ratios] == [
        "training_step", "late_training_k2", "training_step_nano", "late_training_nano_k2",
    ]  # fmt: skip
    assert "nano" in ratios[2].about and all(ratio.value > 0 for ratio in ratios)
