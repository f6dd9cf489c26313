"""The references of augmentation do what ours does."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from protosteer.bench import augmentation
from protosteer.bench.augmentation import PillowAugmentation, kornia_modules, measure
from protosteer.data.augment import Augmentation, Choices
from protosteer.data.transforms import Preprocessing

pytestmark = pytest.mark.slow

LEVELS = Preprocessing(48, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
STEPS = ("mirrored", "jittered", "grey", "blurred", "solarized")


def scenes(count: int, size: int = 60) -> Tensor:
    """uint8: colours that change slowly, with some fine grain."""
    random = torch.Generator().manual_seed(0)
    coarse = torch.rand((count, 3, 5, 5), generator=random) * 220
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 220)
    return (smooth + 35 * torch.rand(smooth.shape, generator=random)).to(torch.uint8)


def drawn(count: int, *happening: str) -> Choices:
    """Random crops, factors, orders and radii; of the other steps those named happen to every image."""
    torch.manual_seed(0)
    choices = Augmentation(LEVELS).draw((count, 3, 60, 60))
    return replace(choices, **{step: torch.full((count,), step in happening) for step in STEPS})


def differences(pixels: Tensor, choices: Choices) -> Tensor:
    """Mean absolute difference of each image, on the scale 0..1."""
    pillow = PillowAugmentation(LEVELS).apply(pixels, choices)
    return (pillow - Augmentation(LEVELS).apply(pixels, choices)).abs().mean((1, 2, 3))


@pytest.mark.parametrize(
    "steps, limit",
    [
        ((), 0.002),
        (("mirrored",), 0.002),
        (("jittered",), 0.01),
        (("grey",), 0.003),
        (("blurred",), 0.005),
        (("solarized",), 0.002),
        (STEPS, 0.012),
    ],
)
def test_pillow_does_each_step_as_we_do(steps: tuple[str, ...], limit: float) -> None:
    assert differences(scenes(24), drawn(24, *steps)).max() < limit


@pytest.mark.parametrize("step", range(4))
def test_pillow_jitters_as_we_do_one_step_at_a_time(step: int) -> None:
    choices = drawn(24, "jittered")
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(24, 1)
    neutral[:, step] = choices.factors[:, step]
    assert differences(scenes(24), replace(choices, factors=neutral)).max() < 0.01


def test_pillow_obeys_every_choice() -> None:
    """Each choice, changed for one side only, is seen: so the agreement above is none by chance."""
    pixels, choices = scenes(24), replace(drawn(24, *STEPS[:2]), radii=torch.linspace(1, 2, 24))
    ours = Augmentation(LEVELS).apply(pixels, choices)
    for field in fields(Choices):
        if field.name == "radii":
            continue  # nothing is blurred here
        kept = getattr(choices, field.name)
        changed = ~kept if kept.dtype == torch.bool else kept.flip(0)
        other = PillowAugmentation(LEVELS).apply(pixels, replace(choices, **{field.name: changed}))
        assert (other - ours).abs().mean() > 0.008, field.name


def test_pillow_draws_by_itself_and_normalises() -> None:
    half = Preprocessing(16, (0.5, 0.25, 0.5), (0.5, 0.25, 1.0))
    pixels = scenes(6)
    torch.manual_seed(3)
    pillow = PillowAugmentation(half)(pixels)
    torch.manual_seed(3)
    ours = Augmentation(half)(pixels)
    assert pillow.dtype == torch.float32
    assert (pillow - ours).abs().mean() < 0.03


def test_kornias_modules_have_the_same_list_and_odds() -> None:
    """No draw is shared, so shares and means over many images are compared."""
    count, size = 1200, 16
    pixels = torch.zeros(count, 3, size, size, dtype=torch.uint8)
    pixels[..., : size // 2] = torch.tensor([200, 60, 90], dtype=torch.uint8).view(3, 1, 1)  # left half alone
    levels = Preprocessing(size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    figures = []
    for augment in (kornia_modules(levels), Augmentation(levels)):
        torch.manual_seed(0)
        images = augment(pixels)
        assert images.shape == (count, 3, size, size)
        left, right = images[..., 2:5].mean((2, 3)), images[..., -5:-2].mean((2, 3))
        grey = ((left.amax(1) - left.amin(1)) < 0.01) & ((right.amax(1) - right.amin(1)) < 0.01)
        mirrored = right.sum(1) > left.sum(1)
        figures.append(
            torch.stack([grey.float().mean(), mirrored.float().mean(), images.mean(), images.std()])
        )
    assert figures[1][:2].tolist() == pytest.approx([0.2, 0.5], abs=0.05)
    assert (figures[0] - figures[1]).abs().max() < 0.05


def test_a_measurement_of_tiny_images() -> None:
    before = torch.get_rng_state()
    ratio = measure("augmentation_nano", 8, 10, 4, repeats=2)
    assert torch.equal(before, torch.get_rng_state())
    assert ratio.name == "augmentation_nano" and ratio.value > 0 and ratio.target == 1.0
    assert [note.split(":")[0] for note in ratio.notes] == [
        "ours", "kornia's modules", "Pillow", "our batched form", "ours one by one",
    ]  # fmt: skip


def test_both_sizes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [sizes[0] for sizes in augmentation.CASES.values()] == [224, 32]
    monkeypatch.setattr(augmentation, "CASES", {"augmentation": (8, 9, 2), "augmentation_nano": (4, 4, 2)})
    ratios = augmentation.run(1)
    assert [ratio.name for ratio in ratios] == ["augmentation", "augmentation_nano"]
    assert "8 px" in ratios[0].about and "4 px" in ratios[1].about
