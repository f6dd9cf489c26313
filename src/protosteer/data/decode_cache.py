"""Decoded images kept in memory, so that what looks at them again and again decodes each file once."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from protosteer.data.images import Chosen, FileImages, ImageSet, Joined

BUDGET = 2**30  # bytes: about 5,500 images of 256 x 256 pixels


class Kept(ImageSet):
    """Another set whose pixels are kept when first asked for, as long as they fit into `budget` bytes.

    Images beyond the budget are decoded each time, and nothing kept makes way for them: a training that goes
    through all images in every epoch would otherwise drop each one just before it is needed again. Only for
    sets that always give the same pixels.
    """

    def __init__(self, images: ImageSet, budget: int = BUDGET):
        self.images = images
        self.budget = budget
        self.kept_bytes = 0
        self._canvases: dict[int, Tensor] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, rows: Sequence[int]) -> Tensor:
        wanted = [int(row) for row in rows]
        with self._lock:  # two threads that want the same image decode it once
            absent = [row for row in dict.fromkeys(wanted) if row not in self._canvases]
            fresh = dict(zip(absent, self.images.pixels(absent), strict=True)) if absent else {}
            self.keep(fresh)
        return torch.stack([fresh[row] if row in fresh else self._canvases[row] for row in wanted])

    def keep(self, fresh: dict[int, Tensor]) -> None:
        """Keep canvases of rows, as far as they fit."""
        for row, canvas in fresh.items():
            if self.kept_bytes + canvas.nbytes <= self.budget:
                view = canvas.untyped_storage().nbytes() > canvas.nbytes
                self._canvases[row] = canvas.clone() if view else canvas  # a view would keep the whole batch
                self.kept_bytes += canvas.nbytes

    def name(self, row: int) -> str:
        return self.images.name(row)

    def portable(self, rows: Sequence[int] | None = None) -> ImageSet:
        return Kept(self.images.portable(rows), self.budget)

    def __reduce__(self) -> tuple[type[Kept], tuple[ImageSet, int]]:
        """What goes to another process begins with nothing kept."""
        return Kept, (self.images, self.budget)


def kept(images: ImageSet) -> ImageSet:
    """The same images, kept once they are decoded, if it is files that they are decoded from."""
    if isinstance(images, Joined):
        return Joined([kept(part) for part in images.parts])
    return Kept(images) if decodes_files(images) and not isinstance(images, Kept) else images


def decodes_files(images: ImageSet) -> bool:
    """Whether the images, below any selection and keeping, are files."""
    while isinstance(images, (Chosen, Kept)):
        images = images.images
    return isinstance(images, FileImages)
