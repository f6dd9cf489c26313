"""Preprocessing: agrees with Pillow, and turns every PIL mode into the right colours."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from expect import expect_error
from protosteer.data.transforms import Preprocessing, resize, to_rgb
from protosteer.errors import DataError

ZERO, ONE, HALF = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.5, 0.5)
RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def levels(size: int, **others: object) -> Preprocessing:
    """Preprocessing whose output is pixels / 255."""
    return Preprocessing(size, ZERO, ONE, **others)  # type: ignore[arg-type]


def picture(height: int, width: int) -> np.ndarray:
    """uint8 [h, w, 3] with smooth shades, hard edges and some noise."""
    rng = np.random.default_rng(height * 1000 + width)
    y, x = np.mgrid[:height, :width]
    shades = np.stack([255 * x / width, 255 * y / height, 127 + 127 * np.sin(9 * x / width)], axis=-1)
    shades[height // 4 : height // 2, width // 3 : width // 2] = (255, 0, 255)
    return (shades + rng.normal(0, 12, shades.shape)).clip(0, 255).astype(np.uint8)


def tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


def one_pixel(mode: str, colour: object) -> tuple[int, ...]:
    return to_rgb(Image.new(mode, (3, 2), colour)).getpixel((1, 1))  # type: ignore[arg-type,return-value]


def gap_to_pillow(source: np.ndarray, new: tuple[int, int], interpolation: str) -> Tensor:
    """Grey levels between our resized image and Pillow's."""
    ours = resize(tensor(source)[None], new, interpolation)[0]
    pillow = Image.fromarray(source).resize(new[::-1], RESAMPLING[interpolation])
    return (ours.int() - tensor(np.asarray(pillow)).int()).abs()


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("sizes", [(8, 8, 32, 32), (300, 300, 64, 64), (90, 140, 45, 70), (64, 64, 100, 100)])
def test_resizing_agrees_with_pillow(sizes, interpolation):
    assert gap_to_pillow(picture(*sizes[:2]), sizes[2:], interpolation).max() <= 1


def test_great_enlargement_is_within_two_levels_of_pillow():
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    for source in (picture(32, 32), noise):
        gap = gap_to_pillow(source, (224, 224), "bicubic")
        assert gap.max() <= 2 and (gap > 1).float().mean() < 1e-4


def test_call_resizes_the_shorter_side_and_crops_the_centre():
    source = picture(60, 100)
    preprocessing = levels(32, crop=0.8)
    assert preprocessing.canvas == 40
    ours = preprocessing(tensor(source)[None])[0] * 255
    pillow = Image.fromarray(source).resize((66, 40), Image.Resampling.BICUBIC).crop((17, 4, 49, 36))
    assert ours.shape == (3, 32, 32) and (ours - tensor(np.asarray(pillow))).abs().max() <= 1.001


@pytest.mark.parametrize("shape", [(50, 30), (30, 50), (40, 40), (7, 90)])
def test_files_and_arrays_are_seen_alike(shape):
    source = picture(*shape)
    preprocessing = levels(28, crop=0.875)
    canvas = preprocessing.to_canvas(Image.fromarray(source))
    assert canvas.shape == (3, 32, 32) and canvas.dtype == torch.uint8
    gap = preprocessing(canvas[None]) - preprocessing(tensor(source)[None])
    assert gap.abs().max() * 255 <= 1.001


def test_very_long_images_are_cut_before_they_are_resized(monkeypatch):
    sizes = []
    resize_image = Image.Image.resize

    def record(image, size, *others):
        sizes.append(size)
        return resize_image(image, size, *others)

    monkeypatch.setattr(Image.Image, "resize", record)
    ramp = np.arange(4000).reshape(1, -1, 1).repeat(2, axis=0).repeat(3, axis=2) // 16
    canvas = levels(8).to_canvas(Image.fromarray(ramp.astype(np.uint8)))
    assert sizes == [(128, 8)]
    assert canvas.shape == (3, 8, 8) and (canvas.int() - 125).abs().max() <= 1  # the middle of 0..249


def test_a_canvas_is_not_resized_again():
    pixels = tensor(picture(32, 32))[None]
    assert torch.equal(levels(28, crop=0.875)(pixels), pixels[:, :, 2:30, 2:30].float() / 255)


def test_normalisation_uses_the_given_statistics():
    pixels = torch.tensor([255, 51, 0], dtype=torch.uint8).view(1, 3, 1, 1).repeat(2, 1, 8, 8)
    out = Preprocessing(8, (0.5, 0.4, 0.1), (0.5, 0.2, 0.1))(pixels)
    assert out.dtype == torch.float32
    assert torch.allclose(out.amax((0, 2, 3)), torch.tensor([1.0, -1.0, -1.0]), atol=1e-6)
    assert torch.allclose(out.amin((0, 2, 3)), torch.tensor([1.0, -1.0, -1.0]), atol=1e-6)


def test_normalise_leaves_its_argument_alone():
    images = torch.full((1, 3, 2, 2), 0.25)
    Preprocessing(2, HALF, HALF).normalise(images)
    assert (images == 0.25).all()


@pytest.mark.parametrize(
    ("mode", "colour", "rgb"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 77, (77, 77, 77)),
        ("LA", (100, 0), (255, 255, 255)),
        ("RGB", (1, 2, 3), (1, 2, 3)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (200, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 128), (127, 127, 127)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("HSV", (0, 255, 255), (255, 0, 0)),
        ("I;16", 65535, (255, 255, 255)),
        ("I;16", 128 * 257, (128, 128, 128)),
        ("I;16", 255, (1, 1, 1)),
        ("I", 40000, (156, 156, 156)),
        ("I", 200, (200, 200, 200)),
        ("F", 0.5, (128, 128, 128)),
        ("F", 90.0, (90, 90, 90)),
    ],
)
def test_every_mode_becomes_rgb(mode, colour, rgb):
    assert one_pixel(mode, colour) == rgb


def test_a_mode_without_a_way_to_rgb_is_named():
    with expect_error("image-mode", DataError):
        to_rgb(Image.new("La", (2, 2)))


def test_dict_round_trip():
    preprocessing = Preprocessing(224, HALF, (0.2, 0.3, 0.4), crop=0.9, interpolation="bilinear")
    assert Preprocessing.from_dict(preprocessing.to_dict()) == preprocessing


@pytest.mark.parametrize(
    "change", [{"mean": (0.5,)}, {"std": (0.5, 0.0, 0.5)}, {"image_size": 0}, {"crop": 1.2}, {"interpolation": "magic"}]
)
def test_impossible_preprocessing_is_refused(change):
    values = Preprocessing(8, HALF, HALF).to_dict() | change
    with expect_error("bad-preprocessing", DataError, name=next(iter(change))):
        Preprocessing.from_dict(values)
