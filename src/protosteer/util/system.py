"""Query the machine: processor, bf16, memory, open files; and tune the memory allocator."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import sys
from contextlib import suppress

# Names and numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD = 32 * 2**20  # the most that older versions accept
_KEPT = 256 * 2**20


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next batch, instead of requesting cleared pages; False without glibc.

    glibc returns the top of its heap as soon as much of it is free, and large blocks at once. A ViT that runs
    batch after batch frees and takes the same memory all the time: docs/explanation/performance.md.
    """
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mapped = mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        return bool(mapped and mallopt(_M_TRIM_THRESHOLD, _KEPT))
    return False


def processor_name() -> str:
    """Return the processor's model name, or the machine type if the system does not report it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


@functools.cache
def cpu_has_bf16() -> bool:
    """Return True if the processor has AVX512-BF16 or AMX-BF16; False if the system does not report it."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpuinfo("flags").split())


def _cpuinfo(field: str) -> str:
    """Return what Linux says of the first processor; an empty text if the system does not report it."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(field):
                return line.partition(":")[2].strip()
    return ""


def max_open_files() -> float:
    """Return how many files and connections this process may have open at once."""
    with suppress(ImportError):  # Windows has no such limit to ask for
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return math.inf if limit == resource.RLIM_INFINITY else limit
    return math.inf


def memory_size() -> float:
    """Return the machine's memory in bytes; infinity if the system does not report it."""
    with suppress(AttributeError, ValueError, OSError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return math.inf
