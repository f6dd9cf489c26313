"""Decoded images in memory, so that training decodes each file once."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from protosteer.data.images import Chosen, FileImages, ImageSet, Joined

BUDGET = 2**30  # bytes: about 5,500 images of 256 x 256 pixels


class DecodedCache(ImageSet):
    """Cache an image set's pixels in memory, up to `budget` bytes.

    Images beyond the budget are decoded each time and evict nothing. Training visits all images in every epoch, so that
    an LRU cache would evict each image just before it is needed. The set must always give the same pixels.
    """

    def __init__(self, images: ImageSet, budget: int = BUDGET):
        self.images = images
        self.budget = budget
        self.cached_bytes = 0
        self._canvases: dict[int, Tensor] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Return uint8 [B, 3, h, w] for row numbers [B]."""
        row_numbers = [int(row) for row in rows]
        with self._lock:  # two threads that want the same image decode it once
            absent = [row for row in dict.fromkeys(row_numbers) if row not in self._canvases]
            fresh = dict(zip(absent, self.images.pixels(absent), strict=True)) if absent else {}
            self.store(fresh)
        return torch.stack([fresh[row] if row in fresh else self._canvases[row] for row in row_numbers])

    def store(self, fresh: dict[int, Tensor]) -> None:
        """Store canvases uint8 [3, h, w] by row number, as far as they fit."""
        for row, canvas in fresh.items():
            if self.cached_bytes + canvas.nbytes <= self.budget:
                view = canvas.untyped_storage().nbytes() > canvas.nbytes
                self._canvases[row] = canvas.clone() if view else canvas  # a view would hold the whole batch
                self.cached_bytes += canvas.nbytes

    def name(self, row: int) -> str:
        """Return the name of one image, for messages."""
        return self.images.name(row)


def cache_decoded(images: ImageSet) -> ImageSet:
    """Wrap the parts of an image set that are decoded from files in a `DecodedCache`."""
    if isinstance(images, Joined):
        return Joined([cache_decoded(part) for part in images.parts])
    below = images
    while isinstance(below, Chosen):
        below = below.images
    return DecodedCache(images) if decodes_files(images) and not isinstance(below, DecodedCache) else images


def decodes_files(images: ImageSet) -> bool:
    """Return True if the images, below any selection and cache, are files."""
    while isinstance(images, (Chosen, DecodedCache)):
        images = images.images
    return isinstance(images, FileImages)
