"""Any bytes are an image, or are refused as one."""

import io
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from PIL import Image
from targets import TARGETS, Target, try_out

from protosteer.data.decode_budget import formats
from protosteer.data.images import FileImages
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

pytestmark = pytest.mark.slow

HOW = Preprocessing(16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 0.9)


@cache
def seeds() -> list[bytes]:
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(0, 256, (20, 24, 4), dtype=np.uint8))
    deep = Image.fromarray(rng.integers(0, 65536, (20, 24)).astype(np.uint16))
    turned = Image.Exif()
    turned[0x0112] = 6
    return [
        *(saved(colours.convert(mode), "PNG") for mode in ("RGBA", "RGB", "P", "1", "LA")),
        saved(deep, "PNG"),
        *(saved(colours.convert(mode), "JPEG", exif=turned) for mode in ("RGB", "CMYK", "L")),
        saved(colours.convert("RGB"), "JPEG", progressive=True),
        saved(colours.convert("P"), "GIF", save_all=True, append_images=[colours.convert("P")] * 2, transparency=0),
        *(saved(colours.convert("RGB"), "TIFF", compression=kind) for kind in (None, "tiff_lzw", "jpeg")),
        saved(deep, "TIFF"),
        saved(Image.fromarray(rng.normal(size=(20, 24)).astype(np.float32)), "TIFF"),
        *(saved(colours, "WEBP", lossless=lossless) for lossless in (True, False)),
        saved(colours, "PNG", save_all=True, append_images=[colours] * 2),
        saved(colours, "WEBP", save_all=True, append_images=[colours] * 2),
        *(saved(colours.convert("RGB"), kind) for kind in ("AVIF", "HEIF") if kind in formats() and kind in Image.SAVE),
        *(saved(colours.convert("RGB"), kind) for kind in ("BMP", "PPM", "TGA", "JPEG2000", "PCX")),
    ]


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def check(data: bytes) -> None:
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of what it forgives
        path = Path(folder, "image.png")
        path.write_bytes(data)
        try:
            pixels = FileImages([path], HOW).pixels([0])
        except DataError as error:
            assert "\n" not in str(error)
        else:
            assert pixels.shape == (1, 3, HOW.canvas, HOW.canvas)


TARGETS["images"] = Target(seeds, check)


def test_images() -> None:
    try_out("images", examples=200)


def test_the_seeds_are_images() -> None:
    with TemporaryDirectory() as folder:
        for number, data in enumerate(seeds()):
            path = Path(folder, f"{number}.png")
            path.write_bytes(data)
            FileImages([path], HOW).pixels([0])
