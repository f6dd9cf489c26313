"""Batches of pixels, the next ones being decoded while the caller works on the last one.

Only image files are read ahead. Arrays are at hand anyway, and what a user's own Dataset does when it is
asked for an item is unknown: if it draws random numbers, in another thread, the same seed would no longer
give the same run. One thread suffices here, because FileImages spreads each batch over several.
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
    """Yields `images.pixels(rows)` for each of the batches, in their order.

    At most `ahead` batches are being decoded or lie ready. An error comes up at the batch that it belongs to.
    Closing the generator drops what is not begun and waits for the batch in work. The pixels stay on the CPU,
    in pinned memory if `device` is a CUDA device, so that the caller's `to(device, non_blocking=True)` does
    not wait.
    """
    if ahead < 1:
        raise SettingsError(
            f"prefetched got ahead={ahead}; it must be at least 1", code="bad-setting", name="ahead"
        )
    pinned = device is not None and device.type == "cuda"
    if decodes_files(images):
        return _read_ahead(images, batches, ahead, pinned)
    return (_fetch(images, rows, pinned) for rows in batches)


def _read_ahead(
    images: ImageSet, batches: Sequence[Rows], ahead: int, pinned: bool
) -> Generator[Tensor, None, None]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    tasks = (pool.submit(_fetch, images, rows, pinned) for rows in batches)  # submitted when taken
    try:
        waiting = deque(islice(tasks, ahead))
        while waiting:
            pixels = waiting.popleft().result()
            waiting.extend(islice(tasks, 1))
            yield pixels
    finally:
        pool.shutdown(cancel_futures=True)


def _fetch(images: ImageSet, rows: Rows, pinned: bool) -> Tensor:
    pixels = images.pixels(rows.tolist() if isinstance(rows, Tensor) else rows)
    return pixels.pin_memory() if pinned else pixels
