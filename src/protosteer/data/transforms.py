"""Evaluation preprocessing: from pixels of any size, or a PIL image of any mode, to what the weights expect.

Resizing is done on uint8, never on floats. Pillow rounds and clips to 8 bits between its horizontal and its
vertical pass, and so does torch on uint8 tensors. On floats the overshoot of the bicubic kernel survives the
first pass, and sharp edges differ from Pillow's by more than ten grey levels. What remains is one level at times,
and two in about one value of a million when 32 pixels become 224: torch keeps fewer bits of the kernel's weights.
(From Pillow 13 on the vertical pass comes first where the height shrinks much more than the width. Only a random
crop needs that, and there we do not follow.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from protosteer.data.decode_budget import DECODING, decoded_bytes
from protosteer.errors import DataError

INTERPOLATIONS = ("bicubic", "bilinear")
MAX_CANVAS = 4096  # pixels along a side: 50 MB per image
_STRIP = 2**20  # pixels


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing that weights were trained with.

    Attributes:
        image_size: Side of the square that the weights expect, in pixels.
        mean: Of each channel, subtracted from values in 0..1.
        std: Of each channel, by which the difference is divided.
        crop: Share of the resized image that the centre crop keeps.
        interpolation: Of resizing.
    """

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop: float = 1.0
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3:
                message = f"preprocessing {name} has {len(values)} values; give three, for R, G, B"
                raise DataError(message, code="bad-preprocessing", name=name)
            object.__setattr__(self, name, values)
        for name, valid, condition in (
            ("std", min(self.std) > 0, "greater than 0"),
            ("image_size", self.image_size >= 1, "at least 1"),
            ("crop", 0 < self.crop <= 1, "in (0, 1]"),
            ("image_size", self.image_size <= MAX_CANVAS * self.crop, f"at most {MAX_CANVAS} divided by crop"),
            ("interpolation", self.interpolation in INTERPOLATIONS, " or ".join(INTERPOLATIONS)),
        ):
            if not valid:
                message = f"preprocessing {name} is {getattr(self, name)!r}; it must be {condition}"
                raise DataError(message, code="bad-preprocessing", name=name)

    @property
    def canvas(self) -> int:
        """Return the length to which the shorter side is resized before the centre crop."""
        return round(self.image_size / self.crop)

    def __call__(self, pixels: Tensor, device: torch.device | None = None) -> Tensor:
        """Turn uint8 [B, 3, h, w] into normalised float32 [B, 3, s, s], on the pixels' device or `device`."""
        height, width = _scaled(pixels.shape[2], pixels.shape[3], self.canvas)
        cropped = centre_crop(resize(pixels, (height, width), self.interpolation), self.image_size)
        # Bytes are a quarter of what would have to be moved after normalising.
        device_pixels = cropped if device is None else cropped.to(device, non_blocking=True)
        return self.normalise(device_pixels.float().div_(255))

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise float images [B, 3, h, w] in 0..1 with the mean and deviation of the weights."""
        mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (images - mean).div_(std)

    def to_canvas(self, image: Image.Image) -> Tensor:
        """Turn a PIL image of any mode and size into uint8 [3, canvas, canvas]."""
        with DECODING.reserve(decoded_bytes(image)):
            image_8bit = _middle(_eight_bit(image))
            height, width = _scaled(image_8bit.height, image_8bit.width, self.canvas)
            resized = image_8bit.resize((width, height), Image.Resampling[self.interpolation.upper()])
        pixels = torch.from_numpy(np.array(resized.convert("RGB"))).permute(2, 0, 1)
        return centre_crop(pixels, self.canvas).contiguous()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Build it from what `to_dict` returned; raise `DataError` for bad values."""
        return cls(**values)


def resize(pixels: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize uint8 [B, 3, h, w] to [B, 3, *size] as Pillow does; torch resizes uint8 on the CPU only."""
    if tuple(pixels.shape[2:]) == size:
        return pixels
    resized = interpolate(pixels.cpu().contiguous(), size=size, mode=interpolation, antialias=True)
    return resized.to(pixels.device)


def centre_crop(pixels: Tensor, size: int) -> Tensor:
    """Crop [..., h, w] to the central [..., size, size]."""
    top, left = (pixels.shape[-2] - size) // 2, (pixels.shape[-1] - size) // 2
    return pixels[..., top : top + size, left : left + size]


def _scaled(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Return the size with the same proportions, rounded down, whose shorter side is `shorter`."""
    if height <= width:
        return shorter, shorter * width // height
    return shorter * height // width, shorter


def _middle(image: Image.Image) -> Image.Image:
    """Crop to at most 16 times as long as wide: the centre crop drops the ends, and resizing them can take gigabytes."""
    longest = 16 * min(image.size)
    if max(image.size) <= longest:
        return image
    width, height = (min(side, longest) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to upright RGB: apply the orientation tag, put transparency on white, scale 16 bits to 8."""
    return _eight_bit(image).convert("RGB")


def _eight_bit(image: Image.Image) -> Image.Image:
    """Convert as `to_rgb` does, but keep grey images grey, and copy only if needed."""
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9):
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        return _from_integers(image)
    if image.mode == "F":
        return _from_floats(image)
    try:
        if image.has_transparency_data:
            return _over_white(image)
        return image if image.mode in ("L", "RGB") else image.convert("RGB")
    except ValueError as error:
        message = f"an image has mode {image.mode}; convert it to RGB first ({error})"
        raise DataError(message, code="image-mode", mode=image.mode) from error


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield an image in strips, each with the number of its first row: intermediate results can be large."""
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _over_white(image: Image.Image) -> Image.Image:
    canvas = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        white = Image.new("RGBA", strip.size, "white")
        canvas.paste(Image.alpha_composite(white, strip.convert("RGBA")).convert("RGB"), (0, top))
    return canvas


def _from_integers(image: Image.Image) -> Image.Image:
    """Convert integers to 8 bits: mode I;16 has 16 bits, and so has mode I unless no value exceeds 255."""
    wide = image.mode != "I" or any(np.asarray(strip).max() > 255 for _, strip in _strips(image))
    grey = Image.new("L", image.size)
    for top, strip in _strips(image):
        values = np.asarray(strip).astype(np.int64)
        values = (values + 128) // 257 if wide else values  # 65535 -> 255, rounded
        grey.paste(Image.fromarray(values.clip(0, 255).astype(np.uint8)), (0, top))
    return grey


def _from_floats(image: Image.Image) -> Image.Image:
    """Convert floats to 8 bits: their range is 0..1 if no value exceeds 1, else 0..255."""
    scale = 255 if all(_finite(strip).max() <= 1 for _, strip in _strips(image)) else 1
    grey = Image.new("L", image.size)
    for top, strip in _strips(image):
        levels = (_finite(strip) * scale).round().clip(0, 255)
        grey.paste(Image.fromarray(levels.astype(np.uint8)), (0, top))
    return grey


def _finite(strip: Image.Image) -> np.ndarray:
    return np.nan_to_num(np.asarray(strip, dtype=np.float32))
