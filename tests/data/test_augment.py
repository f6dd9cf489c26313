"""Augmentation: each step against an independent reference, the odds, the seed, the ranges."""

from __future__ import annotations

import math

import kornia.enhance as enhance
import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from protosteer.data import augment
from protosteer.data.augment import Augmentation
from protosteer.data.transforms import Preprocessing
from protosteer.errors import SettingsError

LEVELS = Preprocessing(32, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
HALF = Preprocessing(32, (0.5, 0.5, 0.5), (0.25, 0.5, 0.5))


def noise(count: int, size: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def ramp(count: int, size: int = 240) -> Tensor:
    """Red grows from left to right by one level per pixel, green from top to bottom."""
    steps = torch.arange(size, dtype=torch.uint8)
    across = steps.expand(size, size)
    return torch.stack([across, across.T, torch.zeros_like(across)]).expand(count, -1, -1, -1)


def only(monkeypatch: pytest.MonkeyPatch, **odds: float) -> None:
    """Switches every random step off but the given ones."""
    for step in ("FLIP", "JITTER", "GREY", "BLUR", "SOLARIZE"):
        monkeypatch.setattr(augment, step, odds.get(step, 0.0))


def uncropped(monkeypatch: pytest.MonkeyPatch, **odds: float) -> None:
    monkeypatch.setattr(augment, "CROP_SCALE", (1.0, 1.0))
    monkeypatch.setattr(augment, "CROP_RATIO", (1.0, 1.0))
    only(monkeypatch, **odds)


# The whole


@pytest.mark.parametrize("kind", ["paper", "no-flip", "crop"])
def test_same_seed_same_bits(kind):
    augmentation = Augmentation(HALF, kind)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(augmentation(noise(20)))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("kind", ["paper", "no-flip", "crop"])
def test_shape_and_range(kind):
    torch.manual_seed(0)
    out = Augmentation(HALF, kind)(noise(40))
    assert out.shape == (40, 3, 32, 32) and out.dtype == torch.float32
    red, others = out[:, 0], out[:, 1:]
    rounding = 1e-5
    assert red.abs().max() <= 2 + rounding and red.max() > 1.5 and red.min() < -1.5
    assert others.abs().max() <= 1 + rounding


def test_every_image_has_its_own_chance():
    torch.manual_seed(0)
    out = Augmentation(LEVELS, "paper")(noise(1, size=64).expand(12, -1, -1, -1))
    assert len({image.numpy().tobytes() for image in out}) == 12


def test_none_is_the_evaluation_preprocessing():
    pixels = noise(4)
    assert torch.equal(Augmentation(HALF, "none")(pixels), HALF(pixels))


def test_pixels_are_left_alone():
    pixels = noise(8, size=32)
    before = pixels.clone()
    Augmentation(LEVELS, "paper")(pixels)
    assert torch.equal(pixels, before)


def test_unknown_kind():
    with pytest.raises(SettingsError, match="'papper'"):
        Augmentation(LEVELS, "papper")


# Crop and flip


def test_a_constant_image_stays_constant_and_normalised():
    pixels = torch.tensor([255, 0, 102], dtype=torch.uint8).view(1, 3, 1, 1).expand(6, -1, 20, 20)
    out = Augmentation(HALF, "crop")(pixels)
    assert torch.allclose(out, torch.tensor([2.0, -1.0, -0.2]).view(3, 1, 1).expand_as(out), atol=1e-6)


def test_crop_area_and_place():
    torch.manual_seed(0)
    out = Augmentation(Preprocessing(60, (0.0,) * 3, (1.0,) * 3), "crop")(ramp(400)) * 255
    left, right, top, bottom = out[:, 0, 30, 0], out[:, 0, 30, -1], out[:, 1, 0, 30], out[:, 1, -1, 30]
    # The middles of the outermost output pixels lie half an output pixel inside the box
    width, height = ((b - a) * 60 / 59 / 240 for a, b in ((left, right), (top, bottom)))
    area = width * height
    assert area.min() > 0.77 and area.max() < 1.03
    assert 0.84 < area.mean() < 0.89 and area.std() > 0.03
    assert 0.74 < (width / height).min() < 0.85 and 1.18 < (width / height).max() < 1.35
    assert left.min() < 5 and left.max() > 25 and top.max() > 25 and abs(left.mean() - top.mean()) < 4
    assert torch.corrcoef(torch.stack([left, top]))[0, 1].abs() < 0.9


def test_crop_is_resized_as_pillow_does_it():
    torch.manual_seed(3)
    pixels = noise(10, size=20)  # enlarged, so that Pillow of any version goes horizontally first
    augmentation = Augmentation(LEVELS, "crop")
    out = augmentation(pixels) * 255
    torch.manual_seed(3)
    boxes = augmentation.boxes.forward_parameters(pixels.shape)["src"].long()
    for image, result, box in zip(pixels, out, boxes, strict=True):
        left, top, right, bottom = *box[0].tolist(), *(box[2] + 1).tolist()
        cut = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, right, bottom))
        pillow = np.asarray(cut.resize((32, 32), Image.Resampling.BICUBIC))
        assert abs(result.permute(1, 2, 0).numpy() - pillow).max() <= 2.01


@pytest.mark.parametrize(("kind", "low", "high"), [("paper", 0.4, 0.6), ("no-flip", 0, 0), ("crop", 0, 0)])
def test_share_of_mirrored_images(kind, low, high, monkeypatch):
    only(monkeypatch, FLIP=0.5)
    torch.manual_seed(0)
    out = Augmentation(LEVELS, kind)(ramp(400, size=64))
    mirrored = out[:, 0, 16, 0] > out[:, 0, 16, -1]
    assert low <= mirrored.float().mean() <= high
    assert (out[:, 1, 0, 16] < out[:, 1, -1, 16]).all()  # never upside down


# Colours


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.4])
def test_jitter_steps_have_torchvisions_meaning(factor):
    image = torch.rand(3, 20, 20, generator=torch.Generator().manual_seed(0))
    for ours, reference in (
        (augment.brightness_, enhance.adjust_brightness_accumulative),
        (augment.contrast_, enhance.adjust_contrast_with_mean_subtraction),
        (augment.saturation_, enhance.adjust_saturation_with_gray_subtraction),
    ):
        changed = image.clone()
        ours(changed, factor)
        assert torch.allclose(changed, reference(image, factor), atol=1e-6), ours.__name__


@pytest.mark.parametrize("turns", [-0.1, -0.03, 0.0, 0.07, 0.1, 0.5])
def test_hue_turns_the_hsv_circle(turns):
    image = torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(0))
    image[:, :4] = image[:1, :4]  # grey
    image[:, 4:8] = image[:, 4:8].round()  # pure colours, black, white
    changed = image.clone()
    augment.hue_(changed, turns)
    assert torch.allclose(changed, enhance.adjust_hue(image, turns * 2 * math.pi), atol=1e-5)


def test_blur_is_pillows_gaussian():
    pixels = noise(1, size=48)[0]
    for radius in (0.5, 1.0, 2.0):
        ours = augment.gaussian_blur(pixels / 255, radius) * 255
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).filter(ImageFilter.GaussianBlur(radius))
        assert abs(ours.permute(1, 2, 0).numpy() - np.asarray(image)).mean() < 3
        assert abs(ours.std() / np.asarray(image).std() - 1) < 0.15


def test_solarize_is_pillows():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(3, -1, -1)
    ours = pixels / 255
    augment.solarize_(ours)
    pillow = ImageOps.solarize(Image.fromarray(pixels[0].numpy()), 128)
    assert torch.equal((ours[0] * 255).round().byte(), torch.from_numpy(np.array(pillow)))


def changed_share(monkeypatch: pytest.MonkeyPatch, **odds: float) -> float:
    """Share of images that the given step, at its real odds, changes."""
    uncropped(monkeypatch, **odds)
    torch.manual_seed(0)
    pixels = noise(1000, size=8)
    out = Augmentation(Preprocessing(8, (0.0,) * 3, (1.0,) * 3), "no-flip")(pixels)
    return ((out - pixels / 255).abs().amax((1, 2, 3)) > 1e-3).float().mean().item()


@pytest.mark.parametrize(("step", "share"), [("JITTER", 0.8), ("GREY", 0.2), ("SOLARIZE", 0.2)])
def test_odds_of_each_step(step, share, monkeypatch):
    assert changed_share(monkeypatch, **{step: getattr(augment, step)}) == pytest.approx(share, abs=0.045)


def test_odds_and_radii_of_the_blur(monkeypatch):
    radii: list[float] = []

    def record(image: Tensor, radius: float) -> Tensor:
        radii.append(radius)
        return image

    monkeypatch.setattr(augment, "gaussian_blur", record)
    uncropped(monkeypatch, BLUR=augment.BLUR)
    torch.manual_seed(0)
    half_size = Preprocessing(112, (0.0,) * 3, (1.0,) * 3)
    Augmentation(half_size, "no-flip")(noise(1, size=8).expand(600, -1, -1, -1))
    assert len(radii) / 600 == pytest.approx(0.1, abs=0.04)
    assert 0.05 <= min(radii) < 0.2 and 0.85 < max(radii) <= 1.0  # half of 0.1 .. 2 at half of 224 pixels


def test_grey_images_are_grey(monkeypatch):
    uncropped(monkeypatch, GREY=1.0)
    out = Augmentation(LEVELS, "no-flip")(noise(3, size=32))
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    expected = (noise(3, size=32) / 255 * weights).sum(1, keepdim=True)
    assert torch.allclose(out, expected.expand(-1, 3, -1, -1), atol=1e-5)


def test_jitter_draws_orders_and_factors_in_range(monkeypatch):
    calls: list[tuple[int, float]] = []
    steps = [lambda image, factor, step=step: calls.append((step, factor)) for step in range(4)]
    monkeypatch.setattr(augment, "JITTER_STEPS", steps)
    uncropped(monkeypatch, JITTER=1.0)
    torch.manual_seed(0)
    Augmentation(LEVELS, "no-flip")(noise(1, size=32).expand(500, -1, -1, -1))
    orders = {tuple(step for step, _ in calls[i : i + 4]) for i in range(0, len(calls), 4)}
    assert len(orders) == 24
    for step, (low, high) in enumerate([(0.6, 1.4), (0.6, 1.4), (0.8, 1.2), (-0.1, 0.1)]):
        factors = torch.tensor([factor for s, factor in calls if s == step])
        width = high - low
        assert len(factors) == 500 and factors.min() >= low - 1e-6 and factors.max() <= high + 1e-6
        assert factors.min() < low + 0.03 * width and factors.max() > high - 0.03 * width


def test_steps_come_in_the_papers_order(monkeypatch):
    order: list[str] = []
    steps = [lambda image, factor: order.append("jitter")] * 4
    monkeypatch.setattr(augment, "JITTER_STEPS", steps)
    monkeypatch.setattr(augment, "rgb_to_grayscale", lambda image: order.append("grey") or image[:1])
    monkeypatch.setattr(augment, "gaussian_blur", lambda image, radius: order.append("blur") or image)
    monkeypatch.setattr(augment, "solarize_", lambda image: order.append("solarize"))
    only(monkeypatch, JITTER=1.0, GREY=1.0, BLUR=1.0, SOLARIZE=1.0)
    Augmentation(LEVELS, "paper")(noise(1))
    assert order == ["jitter"] * 4 + ["grey", "blur", "solarize"]
