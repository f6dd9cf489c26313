"""Images of earlier tasks that a method keeps, and rules for which to keep.

A rule gives row numbers of the images that are kept followed by those that are new.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protosteer.data.decode_cache import cache_decoded
from protosteer.data.images import ArrayImages, Chosen, ImageSet, Joined


class Buffer:
    """uint8 images [n, 3, h, w] with their labels [n], and perhaps more numbers [n, ...] of each.

    What it holds is part of its method's state, so that its bytes are counted and a resumed run has it.
    """

    def __init__(self) -> None:
        self.pixels = torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        self.labels = torch.empty(0, dtype=torch.long)
        self.notes: dict[str, Tensor] = {}
        self.seen = 0  # images that were offered so far

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> ImageSet:
        return ArrayImages(self.pixels)

    def offer(self, images: ImageSet, labels: Tensor, rows: Tensor, **notes: Tensor) -> None:
        """Of what is kept and, after it, these images: keep the given rows, in their order.

        notes: of the new images; those kept before must have them too.
        """
        old, new = rows[rows < len(self)], rows[rows >= len(self)] - len(self)
        place = torch.argsort(
            torch.cat([(rows < len(self)).nonzero()[:, 0], (rows >= len(self)).nonzero()[:, 0]])
        )
        fresh = images.pixels(new.tolist()) if len(new) else self.pixels[:0]

        def joined(kept: Tensor, more: Tensor) -> Tensor:
            return torch.cat([kept, more])[place] if len(kept) else more[place]

        self.notes = {
            name: joined(self.notes[name][old] if len(old) else values[:0], values[new])
            for name, values in notes.items()
        }
        self.pixels = joined(self.pixels[old], fresh)
        self.labels = joined(self.labels[old], labels[new])
        self.seen += len(labels)

    def before(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """What is kept and, after it, a task's images, to be trained on together; rows are those of `offer`."""
        both: ImageSet = Joined([self.images, cache_decoded(images)]) if len(self) else images
        return both, torch.cat([self.labels, labels])

    def share_out(self, images: ImageSet, labels: Tensor, size: int) -> None:
        """Keep as equally many of each class as there is room for; of new ones, drawn by torch's generator."""
        order = torch.randperm(len(labels))
        drawn = labels[order]
        self.offer(Chosen(images, order.tolist()), drawn, balanced(torch.cat([self.labels, drawn]), size))

    def draw(self, count: int) -> Tensor:
        """Rows [at most count], without repetition, by torch's generator."""
        return torch.randperm(len(self))[:count]

    def tensors(self) -> dict[str, Tensor]:
        """Ready for a state."""
        notes = {f"buffer.notes.{name}": values for name, values in self.notes.items()}
        seen = torch.tensor(self.seen)
        return {"buffer.images": self.pixels, "buffer.labels": self.labels, "buffer.seen": seen, **notes}

    def put_back(self, tensors: Mapping[str, Tensor]) -> None:
        self.pixels, self.labels = tensors["buffer.images"], tensors["buffer.labels"]
        self.seen = int(tensors["buffer.seen"])
        start = "buffer.notes."
        self.notes = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}


def reservoir(kept: int, seen: int, new: int, size: int) -> Tensor:
    """Every image that was ever offered is among the rows with the same probability (Vitter, 1985).

    kept: images that are there, of `seen` that were offered. Draws from torch's generator.
    """
    rows = list(range(kept))
    for i in range(new):
        if len(rows) < size:
            rows.append(kept + i)
        elif (place := int(torch.randint(seen + i + 1, ()))) < size:
            rows[place] = kept + i
    return torch.tensor(rows, dtype=torch.long)


def balanced(labels: Tensor, size: int) -> Tensor:
    """As equally many of each class as there is room for; of a class, those that come first.

    labels [n] are those of what is kept and, after it, what is new.
    """
    place = torch.zeros_like(labels)  # of each image within its class
    for label in labels.unique():
        own = labels == label
        place[own] = torch.arange(int(own.sum()))
    return torch.argsort(place, stable=True)[:size].sort().values
