"""Augmentation: each step against an independent reference, the odds, the seed, the ranges."""

import math
from dataclasses import fields

import kornia.enhance as enhance
import numpy as np
import pytest
import torch
from kornia.augmentation import RandomResizedCrop
from kornia.color import rgb_to_grayscale
from kornia.filters import gaussian_blur2d
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from expect import expect_error
from protosteer.data import augment
from protosteer.data.augment import Augmentation, Choices
from protosteer.data.transforms import Preprocessing, resize
from protosteer.errors import SettingsError

LEVELS = Preprocessing(32, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
LARGE = Preprocessing(224, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
HALF = Preprocessing(32, (0.5, 0.5, 0.5), (0.25, 0.5, 0.5))


def noise(count: int, size: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def choices_of(choices: Choices, rows: list[int]) -> Choices:
    return Choices(**{field.name: getattr(choices, field.name)[rows] for field in fields(choices)})


def choices_for(count: int, size: int, output: int, always: bool) -> Choices:
    """Random choices; `always`: every step happens to every image."""
    torch.manual_seed(0)
    drawn = Augmentation(Preprocessing(output, (0.0,) * 3, (1.0,) * 3)).draw((count, 3, size, size))
    for step in ("mirrored", "jittered", "grey", "blurred", "solarized") if always else ():
        setattr(drawn, step, torch.ones(count, dtype=torch.bool))
    return drawn


def ramp(count: int, size: int = 240) -> Tensor:
    """Red grows from left to right by one level per pixel, green from top to bottom."""
    steps = torch.arange(size, dtype=torch.uint8)
    across = steps.expand(size, size)
    return torch.stack([across, across.T, torch.zeros_like(across)]).expand(count, -1, -1, -1)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", ["paper", "no-flip", "crop"])
def test_seed_shape_and_range(kind, batched):
    augmentation, pixels, outs = Augmentation(HALF, kind, batched), noise(40), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(augmentation(pixels))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert torch.equal(pixels, noise(40)), "the pixels given are left alone"
    assert outs[0].shape == (40, 3, 32, 32) and outs[0].dtype == torch.float32
    red, others = outs[0][:, 0], outs[0][:, 1:]
    rounding = 1e-5
    assert red.abs().max() <= 2 + rounding and red.max() > 1.5 and red.min() < -1.5
    assert others.abs().max() <= 1 + rounding


@pytest.mark.parametrize("batched", [False, True, None])
def test_none_is_the_evaluation_preprocessing(batched):
    pixels = noise(4)
    torch.manual_seed(0)
    assert torch.equal(Augmentation(HALF, "none", batched)(pixels), HALF(pixels))
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))


def test_unknown_kind():
    with expect_error("bad-setting", SettingsError):
        Augmentation(LEVELS, "papper")


# What a seed means: published figures depend on these draws and on these bits


def drawn_by_hand(kind: str, count: int, height: int, width: int, size: int) -> dict[str, Tensor]:
    corners = RandomResizedCrop((size, size), scale=(0.8, 1.0), ratio=(3 / 4, 4 / 3)).forward_parameters(
        torch.Size((count, 3, height, width))
    )["src"]
    left, top = corners[:, 0].long().unbind(1)
    right, bottom = corners[:, 2].long().unbind(1)
    drawn = {"boxes": torch.stack([left, top, right + 1, bottom + 1], dim=1)}
    if kind == "paper":
        drawn["mirrored"] = torch.rand(count) < 0.5
    if kind != "crop":
        for name, odds in (("jittered", 0.8), ("grey", 0.2), ("blurred", 0.1), ("solarized", 0.2)):
            drawn[name] = torch.rand(count) < odds
        middle, spread = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0.4, 0.4, 0.2, 0.1])
        drawn["factors"] = middle + spread * (2 * torch.rand(count, 4) - 1)
        drawn["orders"] = torch.rand(count, 4).argsort(dim=1)
        drawn["radii"] = torch.empty(count).uniform_(0.1, 2.0) * (size / 224)
    return drawn


def recoloured_by_hand(image: Tensor, drawn: dict[str, Tensor], i: int) -> Tensor:
    """One float image [3, s, s] through plain torch, with an HSV-free hue as in the module."""
    if drawn["jittered"][i]:
        for step in drawn["orders"][i].tolist():
            factor = drawn["factors"][i, step].item()
            grey = rgb_to_grayscale(image)
            if step == 0:
                image = image * factor
            elif step == 1:
                image = (image * factor) + grey.mean() * (1 - factor)
            elif step == 2:
                image = torch.add(image * factor, grey, alpha=1 - factor)
            else:
                augment.hue_(image, factor)
            image = image.clamp(0, 1)
    if drawn["grey"][i]:
        image = rgb_to_grayscale(image).repeat(3, 1, 1)
    if drawn["blurred"][i]:
        radius = drawn["radii"][i].item()
        size = 2 * math.ceil(3 * radius) + 1
        sigma = torch.full((1, 2), radius)
        image = gaussian_blur2d(image[:, None], (size, size), sigma, border_type="replicate")[:, 0]
    return torch.where(image < 0.5, image, 1 - image) if drawn["solarized"][i] else image


@pytest.mark.parametrize(("size", "height", "width"), [(32, 28, 40), (224, 100, 90)])
@pytest.mark.parametrize("kind", ["paper", "no-flip", "crop"])
def test_draws_and_bits_of_a_seed(kind, size, height, width):
    count = 40 if size == 32 else 12
    pixels = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8)
    preprocessing = Preprocessing(size, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    torch.manual_seed(5)
    drawn = drawn_by_hand(kind, count, height, width, size)
    next_number = torch.rand(1)
    expected = []
    for i, image in enumerate(pixels):
        left, top, right, bottom = drawn["boxes"][i].tolist()
        crop = resize(image[None, :, top:bottom, left:right], (size, size), "bicubic")[0]
        if kind == "paper" and drawn["mirrored"][i]:
            crop = crop.flip(-1)
        expected.append(crop.float() / 255 if kind == "crop" else recoloured_by_hand(crop / 255, drawn, i))
    torch.manual_seed(5)
    choices = Augmentation(preprocessing, kind).draw(pixels.shape)
    assert torch.equal(torch.rand(1), next_number)
    assert all(torch.equal(getattr(choices, name), value) for name, value in drawn.items())
    torch.manual_seed(5)
    out = Augmentation(preprocessing, kind, batched=False)(pixels)
    assert torch.equal(out, preprocessing.normalise(torch.stack(expected)))


@pytest.mark.parametrize(("height", "width"), [(16, 16), (224, 224), (333, 251), (40, 300), (300, 40), (1, 50), (1, 1)])
def test_boxes_are_those_of_kornia_by_any_generator(height, width):
    """The same boxes, and as many numbers drawn; too narrow and too wide images have none that fits."""
    torch.manual_seed(4)
    reference = RandomResizedCrop((8, 8), scale=augment.CROP_SCALE, ratio=augment.CROP_RATIO)
    corners = reference.forward_parameters(torch.Size((50, 3, height, width)))["src"].long()  # ends included
    generator = torch.Generator().manual_seed(4)
    boxes = augment.random_boxes(50, height, width, generator)
    assert torch.equal(boxes, torch.cat([corners[:, 0], corners[:, 2] + 1], dim=1))
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3))


def test_a_generator_draws_what_torchs_own_would():
    pixels, own = noise(6, 40), torch.get_rng_state()
    found = Augmentation(LEVELS)(pixels, torch.Generator().manual_seed(9))
    assert torch.equal(torch.get_rng_state(), own)
    torch.manual_seed(9)
    assert torch.equal(found, Augmentation(LEVELS)(pixels))


def test_a_default_device_does_not_change_the_draws():
    torch.manual_seed(0)
    expected = Augmentation(LEVELS).draw((6, 3, 40, 40))
    torch.manual_seed(0)
    with torch.device("meta"):
        choices = Augmentation(LEVELS).draw((6, 3, 40, 40))
    for field in fields(Choices):
        assert torch.equal(getattr(choices, field.name), getattr(expected, field.name)), field.name


def both(preprocessing: Preprocessing, pixels: Tensor, choices: Choices) -> tuple[Tensor, Tensor]:
    one, many = (Augmentation(preprocessing, batched=batched) for batched in (False, True))
    return one.apply(pixels, choices), many.apply(pixels, choices)


@pytest.mark.parametrize("size", [20, 32, 45, 150])
def test_crops_agree_within_two_levels_on_noise(size):
    """Enlarged, kept and shrunk; Pillow's 8 bits and antialiasing included, at the edge of the box as well."""
    torch.manual_seed(0)
    pixels = noise(12, size=size)
    choices = Augmentation(LEVELS, "crop").draw(pixels.shape)
    one, many = both(LEVELS, pixels, choices)
    levels = 255 * (one - many).abs()
    assert levels.max() < 2.01 and (levels > 0.5).float().mean() < 0.02


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("size", [32, 224])
def test_colours_agree_to_five_digits(size, always):
    """Boxes of the output's own size leave the crop out, so that only float steps remain."""
    count = 60 if size == 32 else 12
    choices = choices_for(count, size, size, always)
    choices.boxes[:] = torch.tensor([0, 0, size, size])
    choices.grey[: count // 2] = False  # otherwise every colour would be gone before the comparison
    one, many = both(Preprocessing(size, (0.0,) * 3, (1.0,) * 3), noise(count, size=size), choices)
    assert torch.allclose(one, many, rtol=0, atol=1e-5)
    assert len(set(augment._reaches(choices.radii).tolist())) > 1 or size == 32


def test_batched_does_not_depend_on_the_rest_of_the_batch():
    pixels, choices = noise(10, size=40), choices_for(10, 40, 32, always=True)
    augmentation = Augmentation(LEVELS, batched=True)
    together = augmentation.apply(pixels, choices)
    for row in range(10):
        alone = augmentation.apply(pixels[[row]], choices_of(choices, [row]))
        assert torch.allclose(alone[0], together[row], rtol=0, atol=1e-5)


def test_size_and_device_decide_and_can_be_overruled(monkeypatch):
    """The meta device stands for a GPU: tensors of two devices do not mix, and values cannot be looked at."""
    pixels = torch.empty(50, 3, 40, 40, dtype=torch.uint8, device="meta")
    out = Augmentation(LEVELS)(pixels)
    assert out.shape == (50, 3, 32, 32) and out.device.type == "meta"
    taken: list[str] = []
    for way in ("_one_by_one", "_batched"):
        monkeypatch.setattr(augment, way, lambda pixels, *_, way=way: taken.append(way) or pixels.float())
    for size, device, batched, way in (
        (64, "cpu", None, "_batched"),
        (65, "cpu", None, "_one_by_one"),
        (65, "meta", None, "_batched"),
        (65, "cpu", True, "_batched"),
        (32, "meta", False, "_one_by_one"),
    ):
        pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8, device=device)
        Augmentation(Preprocessing(size, (0.5,) * 3, (0.5,) * 3), batched=batched)(pixels)
        assert taken.pop() == way


@pytest.mark.parametrize("batched", [False, True])
def test_a_constant_image_stays_constant_and_normalised(batched):
    pixels = torch.tensor([255, 0, 102], dtype=torch.uint8).view(1, 3, 1, 1).expand(6, -1, 20, 20)
    out = Augmentation(HALF, "crop", batched)(pixels)
    assert torch.allclose(out, torch.tensor([2.0, -1.0, -0.2]).view(3, 1, 1).expand_as(out), atol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
def test_crop_area_and_place(batched):
    torch.manual_seed(0)
    out = Augmentation(Preprocessing(60, (0.0,) * 3, (1.0,) * 3), "crop", batched)(ramp(300)) * 255
    left, right, top, bottom = out[:, 0, 30, 0], out[:, 0, 30, -1], out[:, 1, 0, 30], out[:, 1, -1, 30]
    # The middles of the outermost output pixels lie half an output pixel inside the box
    width, height = ((b - a) * 60 / 59 / 240 for a, b in ((left, right), (top, bottom)))
    area = width * height
    assert area.min() > 0.77 and area.max() < 1.03
    assert 0.84 < area.mean() < 0.89 and area.std() > 0.03
    assert 0.74 < (width / height).min() < 0.85 and 1.18 < (width / height).max() < 1.35
    assert left.min() < 5 and left.max() > 25 and top.max() > 25 and abs(left.mean() - top.mean()) < 4
    assert torch.corrcoef(torch.stack([left, top]))[0, 1].abs() < 0.9


@pytest.mark.parametrize("batched", [False, True])
def test_crop_is_resized_as_pillow_does_it(batched):
    torch.manual_seed(3)
    pixels = noise(10, size=20)  # enlarged, so that Pillow of any version goes horizontally first
    augmentation = Augmentation(LEVELS, "crop", batched)
    out = augmentation(pixels) * 255
    torch.manual_seed(3)
    boxes = augmentation.draw(pixels.shape).boxes
    for image, result, box in zip(pixels, out, boxes, strict=True):
        cut = Image.fromarray(image.permute(1, 2, 0).numpy()).crop(tuple(box.tolist()))
        pillow = np.asarray(cut.resize((32, 32), Image.Resampling.BICUBIC))
        assert abs(result.permute(1, 2, 0).numpy() - pillow).max() <= 2.01


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
        blurred = pixels[None] / 255
        augment.blur_(blurred, radius, math.ceil(3 * radius))
        ours = blurred[0] * 255
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).filter(ImageFilter.GaussianBlur(radius))
        assert abs(ours.permute(1, 2, 0).numpy() - np.asarray(image)).mean() < 3
        assert abs(ours.std() / np.asarray(image).std() - 1) < 0.15


def test_solarize_is_pillows():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(3, -1, -1)
    ours = pixels / 255
    augment.solarize_(ours)
    pillow = ImageOps.solarize(Image.fromarray(pixels[0].numpy()), 128)
    assert torch.equal((ours[0] * 255).round().byte(), torch.from_numpy(np.array(pillow)))
