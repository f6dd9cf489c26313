"""A buffer of images of earlier tasks, and rules for which images it keeps.

A rule returns row numbers: of the images in the buffer, followed by those of the new images.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
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
        offered: The number of images offered so far.
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

        `notes` belong to the new images; the images in the buffer must have notes of the same names.
        """
        in_buffer = rows < len(self)
        pixels = self.pixels[rows[in_buffer]]
        if not in_buffer.all():
            new_pixels = images.pixels((rows[~in_buffer] - len(self)).tolist())
            pixels = torch.cat([pixels, new_pixels]) if in_buffer.any() else new_pixels
        self.pixels = pixels[torch.cat([in_buffer.nonzero()[:, 0], (~in_buffer).nonzero()[:, 0]]).argsort()]
        stored_notes = {name: self.notes[name] if len(self) else values[:0] for name, values in notes.items()}
        self.notes = {name: torch.cat([stored_notes[name], values])[rows] for name, values in notes.items()}
        self.labels = torch.cat([self.labels, labels])[rows]
        self.offered += len(labels)

    def sample(
        self,
        images: ImageSet,
        rows: Tensor,
        labels: Tensor,
        size: int,
        generator: torch.Generator | None = None,
        **notes: Tensor,
    ) -> None:
        """Offer images by reservoir sampling: every image offered so far is kept with equal probability (Vitter, 1985).

        Args:
            images: A task's images.
            rows: The rows of the images to offer, int64 [n].
            labels: Their class numbers, int64 [n].
            size: The most images that the buffer may hold.
            generator: Draws the places; None: torch's own.
            **notes: Further numbers of each, [n, ...]. If they are wider than stored ones, those are padded with NaN.
        """
        places: dict[int, int] = {}  # position in `rows` by place in the buffer
        count = len(self)
        for i in range(len(rows)):
            self.offered += 1
            if count < size:
                places[count] = i
                count += 1
            elif (place := int(torch.randint(self.offered, (), generator=generator))) < size:
                places[place] = i
        slots, positions = (torch.tensor(list(part), dtype=torch.long) for part in (places.keys(), places.values()))
        if len(positions):
            self.pixels = _place_rows(self.pixels, images.pixels(rows[positions].tolist()), slots, count)
            self.labels = _place_rows(self.labels, labels[positions], slots, count)
        for name, values in notes.items():
            stored_values = self.notes.get(name, values[:0])
            stored_values = F.pad(stored_values, (0, values.shape[1] - stored_values.shape[1]), value=torch.nan)
            self.notes[name] = _place_rows(stored_values, values[positions], slots, count)

    def joined_with(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """Return the buffer followed by a task's images, and all labels; rows are those of `offer`."""
        all_images: ImageSet = Joined([self.images, cache_decoded(images)]) if len(self) else images
        return all_images, torch.cat([self.labels, labels])

    def offer_balanced(
        self, images: ImageSet, labels: Tensor, size: int, generator: torch.Generator | None = None
    ) -> None:
        """Keep `size` images, equally many of each class; new ones are drawn."""
        order = torch.randperm(len(labels), generator=generator)
        new_labels = labels[order]
        rows = balanced_rows(torch.cat([self.labels, new_labels]), size)
        self.offer(Chosen(images, order.tolist()), new_labels, rows)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw at most `count` rows without repetition."""
        return torch.randperm(len(self), generator=generator)[:count]

    def state_dict(self) -> dict[str, Tensor]:
        """Return all contents as tensors by name."""
        notes = {f"{_NOTES}{name}": values for name, values in self.notes.items()}
        return {"images": self.pixels, "labels": self.labels, "seen": torch.tensor(self.offered), **notes}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.pixels, self.labels = tensors["images"].clone(), tensors["labels"].clone()
        self.offered = int(tensors["seen"])
        self.notes = {n.removeprefix(_NOTES): t.clone() for n, t in tensors.items() if n.startswith(_NOTES)}


def _place_rows(stored_rows: Tensor, new_rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Write new rows to their places among stored rows, padded to `count` rows; the stored tensor may change."""
    padding = new_rows.new_empty(count - len(stored_rows), *new_rows.shape[1:])
    if len(padding):
        stored_rows = torch.cat([stored_rows, padding]) if len(stored_rows) else padding
    stored_rows[places] = new_rows
    return stored_rows


def balanced_rows(labels: Tensor, size: int) -> Tensor:
    """Choose `size` rows of labels [n], the first ones of each class; class counts differ by one at most."""
    rank = torch.zeros_like(labels)  # of each image within its class
    for label in labels.unique():
        mask = labels == label
        rank[mask] = torch.arange(int(mask.sum()))
    return torch.argsort(rank, stable=True)[:size].sort().values
