"""Keeps freed memory for the next batch, instead of asking the system for fresh, cleared pages again and again.

glibc gives the upper end of its memory back as soon as much of it is free, and large blocks at once. A ViT that is run over
batch after batch frees and takes the same memory all the time. docs/performance.md has what keeping it is worth.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

# Names and numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD = 32 * 2**20  # the most that older versions accept
_KEPT = 256 * 2**20


def keep_freed_memory() -> bool:
    """Whether the system's allocator could be told so; only glibc knows how."""
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mapped = mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        return bool(mapped and mallopt(_M_TRIM_THRESHOLD, _KEPT))
    return False
