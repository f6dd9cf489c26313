"""How much memory decoding may take: of one image, and of all images that the process decodes at once.

A file of 95 kB can be a picture of 7000 x 7000 pixels. What it will take is told by its header, and waits until
there is room for it. JPEG files are decoded in full even where a canvas is much smaller: Pillow's `draft` would
take less, but gives other pixels, and what models have learned depends on them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from PIL import Image
from PIL.ImageFile import ImageFile

from protosteer.errors import DataError

MOST_DECODED = 2**30  # bytes
# Formats whose decoders need no other program: of some, Pillow would start one.
_FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "AVIF",
    "JPEG2000",
    "PPM",
    "TGA",
    "ICO",
    "PCX",
    "HEIF",
)

# Bytes per pixel: in Pillow's memory, by mode; what a decoder needs besides, by format.
_IN_MEMORY = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
_DECODER = {"WEBP": 12, "AVIF": 12, "JPEG2000": 16, "GIF": 8}
_COLOUR = 4  # RGB takes as much as RGBA
_PROGRESSIVE = 6  # coefficients of all of a JPEG image at once


class Budget:
    """Bytes that several threads share."""

    def __init__(self, most: int):
        self.most = most
        self._used = 0
        self._changed = Condition()

    @contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Waits until so much is left. More than there ever is, is refused."""
        if amount > self.most:
            raise DataError(
                f"an image takes {amount:,} bytes, more than {self.most:,}; make it smaller",
                code="image-too-large",
            )
        with self._changed:
            self._changed.wait_for(lambda: self._used + amount <= self.most)
            self._used += amount
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify_all()


DECODING = Budget(MOST_DECODED)


@functools.cache
def formats() -> list[str]:
    """Those that files are looked through for, and that this build of Pillow has."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def decoded_bytes(image: Image.Image) -> int:
    """What an image takes while it becomes a canvas, estimated before it is decoded."""
    own = _IN_MEMORY.get(image.mode, _COLOUR)
    each = {"L": 0, "RGB": 0, "F": 2}.get(image.mode, 2 if image.mode.startswith("I") else _COLOUR)
    if isinstance(image, ImageFile):  # else its pixels are somebody's already
        each += own + _DECODER.get(image.format or "", 0)
        each += _PROGRESSIVE if image.info.get("progressive") else 0
    if "exif" in image.info:  # it may have to be turned
        each += own
    return each * image.width * image.height
