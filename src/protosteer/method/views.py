"""The augmented images that a prompt is trained on, as tokens that have left the frozen trunk.

No prompt touches the layers before `prompt_from_layer`, so what comes out of them depends on the view of an image
alone. `FreshViews` draws a new view whenever an image is met, as the paper does. `CachedViews` draws a fixed number
of views of every image beforehand and keeps their tokens: each epoch trains on the next view of all images, and
neither decoding, nor augmentation, nor the trunk is paid for again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.augment import Augmentation
from protosteer.data.images import ImageSet
from protosteer.data.prefetch import prefetched
from protosteer.errors import TrainingError

BUDGET = 2**30  # bytes of tokens that are kept in memory; more of them lie in a file
KEPT = torch.float16


class Views(Protocol):
    def batches(self, epoch: int, order: Sequence[Tensor]) -> Iterator[Tensor]:
        """Tokens [B, T, D] for each batch of rows, as this epoch (from 0) sees them."""
        ...


class FreshViews:
    def __init__(self, backbone: Backbone, images: ImageSet, augment: Augmentation, layers: int):
        self.backbone = backbone
        self.images = images
        self.augment = augment
        self.layers = layers

    def batches(self, epoch: int, order: Sequence[Tensor]) -> Iterator[Tensor]:
        device = self.backbone.device
        for pixels in prefetched(self.images, order, device=device):
            yield self.view(pixels.to(device, non_blocking=True))

    def view(self, pixels: Tensor) -> Tensor:
        return self.backbone.trunk(self.augment(pixels), self.layers)


class CachedViews:
    """Tokens [views, images, T, D], rounded to 16 bits; beyond the budget in a file that no one else sees."""

    def __init__(
        self,
        fresh: FreshViews,
        count: int,
        batch_size: int,
        on_batch: Callable[[int], None] | None = None,
        budget: int = BUDGET,
    ):
        backbone, images = fresh.backbone, fresh.images
        config = backbone.vit.config
        shape = (count, len(images), 1 + config.registers + config.patches, config.dim)
        self.tokens = _room(shape, budget)
        self.device = backbone.device
        rows = torch.arange(len(images)).split(batch_size)
        for some, pixels in zip(rows, prefetched(images, rows, device=self.device), strict=True):
            moved = pixels.to(self.device, non_blocking=True)
            for view in range(count):
                self.tokens[view, some[0] : some[-1] + 1] = _rounded(fresh.view(moved))
            if on_batch:
                on_batch(int(some[-1]) + 1)

    def batches(self, epoch: int, order: Sequence[Tensor]) -> Iterator[Tensor]:
        tokens = self.tokens[epoch % len(self.tokens)]
        for rows in order:
            some = tokens[rows].pin_memory() if self.device.type == "cuda" else tokens[rows]
            yield some.to(self.device, non_blocking=True).float()


def _rounded(tokens: Tensor) -> Tensor:
    kept = tokens.to(KEPT)
    if not kept.isfinite().all():
        raise TrainingError(
            f"the trunk's outputs reach {tokens.abs().max().item():.3g}, too much for cached views of 16 bits; "
            "train without them (cached_views = 0)"
        )
    return kept


def _room(shape: tuple[int, ...], budget: int) -> Tensor:
    size = int(np.prod(shape)) * KEPT.itemsize
    if size <= budget:
        return torch.empty(shape, dtype=KEPT)
    try:
        # Without a name, so that it is gone with the process, however that ends.
        with tempfile.TemporaryFile(prefix="protosteer-views-") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a disk that is too small must say so now
            else:
                file.truncate(size)
            mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
    except OSError as error:
        raise TrainingError(
            f"cached views take {size / 1e9:.1f} GB, and {tempfile.gettempdir()} cannot hold them "
            f"({error.strerror}); lower cached_views (now {shape[0]}), or let TMPDIR name a larger disk"
        ) from error
    return torch.from_numpy(mapped).view(KEPT).view(shape)
