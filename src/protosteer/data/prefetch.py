"""Decode the next batches while the caller works on the current one.

Only image files are read ahead. Arrays are in memory. A user's own Dataset may draw random numbers: in another thread
the same seed would no longer give the same run. One thread suffices, because `FileImages` spreads
each batch over several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from protosteer.data.decode_cache import decodes_files
from protosteer.data.images import ImageSet
from protosteer.errors import SettingsError

Rows = Sequence[int] | Tensor


def prefetched(
    images: ImageSet, batches: Sequence[Rows], ahead: int = 2, device: torch.device | None = None
) -> Generator[Tensor, None, None]:
    """Yield `images.pixels(rows)`, uint8 [B, 3, h, w], for each batch, in order.

    An error is raised at the batch that it belongs to. Closing the generator drops batches that have not started
    and waits for the one in progress.

    Args:
        images: The images.
        batches: Row numbers of each batch.
        ahead: Batches that may be decoded or ready at once.
        device: Where the caller moves the pixels; for a CUDA device they lie in pinned memory, so that
            `to(device, non_blocking=True)` does not wait.

    Raises:
        SettingsError: `ahead` is below 1.
    """
    if ahead < 1:
        raise SettingsError(f"prefetched got ahead={ahead}; it must be at least 1", code="bad-setting", name="ahead")
    pinned = device is not None and device.type == "cuda"
    if decodes_files(images):
        return _read_ahead(images, batches, ahead, pinned)
    return (_fetch(images, rows, pinned) for rows in batches)


def _read_ahead(images: ImageSet, batches: Sequence[Rows], depth: int, pinned: bool) -> Generator[Tensor, None, None]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    tasks = (pool.submit(_fetch, images, rows, pinned) for rows in batches)  # submitted when taken
    try:
        queue = deque(islice(tasks, depth))
        while queue:
            pixels = queue.popleft().result()
            queue.extend(islice(tasks, 1))
            yield pixels
    finally:
        pool.shutdown(cancel_futures=True)


def _fetch(images: ImageSet, rows: Rows, pinned: bool) -> Tensor:
    pixels = images.pixels(rows.tolist() if isinstance(rows, Tensor) else rows)
    return pixels.pin_memory() if pinned else pixels
