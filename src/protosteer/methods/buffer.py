"""A buffer of images of earlier tasks, and rules for which images it keeps.

A rule returns row numbers: of the images in the buffer, followed by those of the new images.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protosteer.data.decode_cache import cache_decoded
from protosteer.data.images import ArrayImages, Chosen, ImageSet, Joined

_NOTES = "notes."


class Buffer:
    """Images of earlier tasks with their labels.

    The buffer is part of its method's state, so its bytes are counted and a resumed run has it.

    Attributes:
        pixels: uint8 [n, 3, h, w].
        labels: Class numbers, int64 [n].
        notes: Further numbers of each image, such as logits, [n, ...] by name.
        offered: How many images were offered so far.
    """

    def __init__(self) -> None:
        self.pixels = torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        self.labels = torch.empty(0, dtype=torch.long)
        self.notes: dict[str, Tensor] = {}
        self.offered = 0

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> ImageSet:
        """The images as a set."""
        return ArrayImages(self.pixels)

    def offer(self, images: ImageSet, labels: Tensor, rows: Tensor, **notes: Tensor) -> None:
        """Keep the given rows, in their order, of the buffer followed by new images.

        notes are those of the new images; the images in the buffer must have the same.
        """
        old, new = rows[rows < len(self)], rows[rows >= len(self)] - len(self)
        order = torch.argsort(torch.cat([(rows < len(self)).nonzero()[:, 0], (rows >= len(self)).nonzero()[:, 0]]))
        fresh = images.pixels(new.tolist()) if len(new) else self.pixels[:0]

        def joined(before: Tensor, more: Tensor) -> Tensor:
            return torch.cat([before, more])[order] if len(before) else more[order]

        self.notes = {
            name: joined(self.notes[name][old] if len(old) else values[:0], values[new])
            for name, values in notes.items()
        }
        self.pixels = joined(self.pixels[old], fresh)
        self.labels = joined(self.labels[old], labels[new])
        self.offered += len(labels)

    def joined_with(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """Return the buffer followed by a task's images, and all labels; rows are those of `offer`."""
        both: ImageSet = Joined([self.images, cache_decoded(images)]) if len(self) else images
        return both, torch.cat([self.labels, labels])

    def offer_balanced(
        self, images: ImageSet, labels: Tensor, size: int, generator: torch.Generator | None = None
    ) -> None:
        """Keep `size` images, equally many of each class; new ones are drawn."""
        order = torch.randperm(len(labels), generator=generator)
        drawn = labels[order]
        self.offer(Chosen(images, order.tolist()), drawn, balanced(torch.cat([self.labels, drawn]), size))

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw at most `count` rows without repetition."""
        return torch.randperm(len(self), generator=generator)[:count]

    def state_dict(self) -> dict[str, Tensor]:
        """Return all contents as tensors by name."""
        notes = {f"{_NOTES}{name}": values for name, values in self.notes.items()}
        return {"images": self.pixels, "labels": self.labels, "seen": torch.tensor(self.offered), **notes}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.pixels, self.labels, self.offered = tensors["images"], tensors["labels"], int(tensors["seen"])
        self.notes = {n.removeprefix(_NOTES): t for n, t in tensors.items() if n.startswith(_NOTES)}


def reservoir(size: int, count: int, offered: int, new: int, generator: torch.Generator | None = None) -> Tensor:
    """Choose rows by reservoir sampling: every image ever offered is kept with equal probability (Vitter, 1985).

    Args:
        size: How many images the buffer may hold.
        count: How many it holds.
        offered: How many it was offered so far.
        new: How many are offered now.
        generator: Draws the rows; None: torch's own.

    Returns:
        The rows to keep.
    """
    rows = list(range(count))
    for i in range(new):
        if len(rows) < size:
            rows.append(count + i)
        elif (place := int(torch.randint(offered + i + 1, (), generator=generator))) < size:
            rows[place] = count + i
    return torch.tensor(rows, dtype=torch.long)


def balanced(labels: Tensor, size: int) -> Tensor:
    """Choose `size` rows of labels [n], equally many of each class or one less; of a class, those that come first."""
    rank = torch.zeros_like(labels)  # of each image within its class
    for label in labels.unique():
        own = labels == label
        rank[own] = torch.arange(int(own.sum()))
    return torch.argsort(rank, stable=True)[:size].sort().values
