"""Limit the memory that decoding takes, for one image and for all images decoded at once.

A file of 95 kB can hold 7000 x 7000 pixels. The memory that it needs follows from its header, and decoding waits until
that much is free. JPEG files are decoded at full size: Pillow's `draft` needs less memory but gives other pixels, on
which saved models depend.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition

from PIL import Image
from PIL.ImageFile import ImageFile

from protosteer.errors import DataError

MAX_DECODED = 2**30  # bytes
# Formats whose decoders start no other program, and which Pillow opens without decoding. It decodes ICO files at once.
_FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "PCX", "HEIF"]

# Bytes per pixel: of an image in Pillow, by mode; of a decoder's buffers, by format.
_IN_MEMORY = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
_DECODER = {"WEBP": 12, "AVIF": 12, "HEIF": 12, "JPEG2000": 16, "GIF": 8}
_COLOUR = 4  # RGB takes as much as RGBA
_PROGRESSIVE = 6  # a progressive JPEG's coefficients


class Budget:
    """Share a number of bytes among threads."""

    def __init__(self, limit: int):
        self.limit = limit
        self._used = 0
        self._changed = Condition()

    @contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        """Wait until `amount` bytes are free, and hold them during the block."""
        if amount > self.limit:
            message = f"an image takes {amount:,} bytes, more than {self.limit:,}; make it smaller"
            raise DataError(message, code="image-too-large")
        with self._changed:
            self._changed.wait_for(lambda: self._used + amount <= self.limit)
            self._used += amount
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify_all()


DECODING = Budget(MAX_DECODED)


@functools.cache
def formats() -> list[str]:
    """Return the accepted formats that this build of Pillow can read; HEIF with pillow-heif, if that is installed."""
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def decoded_bytes(image: Image.Image) -> int:
    """Estimate from the header how many bytes an image takes while it becomes a canvas."""
    num_bytes = _IN_MEMORY.get(image.mode, _COLOUR)
    per_pixel = {"L": 0, "RGB": 0, "F": 2}.get(image.mode, 2 if image.mode.startswith("I") else _COLOUR)
    if isinstance(image, ImageFile):  # else its pixels are in memory already
        per_pixel += num_bytes + _DECODER.get(image.format or "", 0)
        per_pixel += _PROGRESSIVE if image.info.get("progressive") else 0
    if "exif" in image.info:  # it may have to be rotated
        per_pixel += num_bytes
    return per_pixel * image.width * image.height
