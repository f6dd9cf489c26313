"""Training images as a backbone is to see them: decoded ahead, augmented anew whenever they are met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from protosteer.data.augment import Augmentation
from protosteer.data.images import ImageSet
from protosteer.data.prefetch import prefetched


def augmented(
    images: ImageSet, batches: Sequence[Tensor], augment: Augmentation, device: torch.device
) -> Iterator[Tensor]:
    """Normalised [B, 3, H, W] for every batch of row numbers [B]."""
    for pixels in prefetched(images, batches, device=device):
        yield augment(pixels.to(device, non_blocking=True))
