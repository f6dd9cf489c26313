"""A measured step is paper/trainer.py's own, and the reference does the same in another way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from conftest import train
from protosteer.bench import training
from protosteer.bench.harness import pictures
from protosteer.bench.training import Step, by_pillow, naive, ours
from protosteer.data.augment import Augmentation
from protosteer.data.transforms import Preprocessing
from protosteer.settings import Settings
from protosteer.util import training_state
from vit_toys import small

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neck's 2048 would take most of the time here."""
    monkeypatch.setattr(training, "Settings", partial(Settings, neck_hidden=32))


def seeded(make: Callable[..., Step], *arguments: object) -> Step:
    """A step whose random start is always the same."""
    torch.manual_seed(1)
    return make(*arguments)


@pytest.mark.parametrize("from_layer", [1, 3])
def test_our_step_is_that_of_training(monkeypatch: pytest.MonkeyPatch, from_layer: int) -> None:
    """Training draws no batches here, and the step its prototypes beforehand: their states of chance are one."""
    backbone = small(depth=4)
    pixels = pictures(backbone, 20)
    step = seeded(ours, backbone, pixels, from_layer)
    state = torch.get_rng_state()
    step()

    def in_order(count: int, _: int) -> list[torch.Tensor]:
        torch.set_rng_state(state)
        return [torch.arange(count)]

    monkeypatch.setattr(training_state, "epoch_batches", in_order)
    settings = Settings.preset("paper", prompt_start="random", epochs=1, batch_size=20, neck_hidden=32)
    settings = settings.replace(prompt_from_layer=from_layer)
    trained = train(backbone, pixels, step.labels, settings, anchors=step.prototypes, seed=1)
    assert step.prompt.shape == (5 - from_layer, 1, backbone.dim) and step.prompt.grad.norm() > 0
    assert torch.equal(step.prompt, trained.prompt)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_the_reference_has_the_same_gradient(monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    backbone, images = small(4, pool), torch.randn(20, 3, 16, 16)
    monkeypatch.setattr(training, "by_pillow", lambda _, pixels: images)
    monkeypatch.setattr(training, "Augmentation", lambda _: lambda pixels: images)
    steps = [seeded(make, backbone, pictures(backbone, 20)) for make in (naive, ours)]
    for step in steps:
        torch.manual_seed(2)  # of the prototypes' noise
        step()
    wanted, found = (step.prompt.grad for step in steps)
    assert (wanted - found).norm() < 1e-4 * wanted.norm()
    for theirs, mine in zip(steps[0].head.parameters(), steps[1].head.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-6)


def test_pillow_does_what_we_do() -> None:
    """The same choices, drawn from one seed; other choices are seen, so that the agreement is none by chance."""
    augment = Augmentation(Preprocessing(48, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    smooth = torch.rand((24, 3, 5, 5), generator=torch.Generator().manual_seed(0)) * 220
    pixels = torch.nn.functional.interpolate(smooth, size=(60, 60), mode="bicubic").clamp(0, 220).byte()
    torch.manual_seed(3)
    pillow = by_pillow(augment, pixels)
    for seed, agrees in ((3, True), (4, False)):
        torch.manual_seed(seed)
        apart = (pillow - augment(pixels)).abs().mean((1, 2, 3))
        assert bool(apart.max() < 0.012) is agrees


def test_all_ratios_of_the_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"vit_tiny": small, "BATCH": 4, "BATCH_NANO": 4}.items():
        monkeypatch.setattr(training, name, value)
    before = torch.get_rng_state()
    ratios = training.run(1)
    assert torch.equal(before, torch.get_rng_state())
    names = ["training_step", "late_training_k2", "training_step_nano", "late_training_nano_k2"]
    assert [ratio.name for ratio in ratios] == names
    assert "nano" in ratios[2].about and all(ratio.value > 0 for ratio in ratios)
