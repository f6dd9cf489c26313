"""The file that a training is resumed from.

It is written at intervals of time. This changes no result: a training that is resumed from any step is bit-identical
to one that was never interrupted.
"""

from __future__ import annotations

import time
import warnings
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from protosteer.errors import ModelFileError, ProtosteerWarning
from protosteer.util.distributed import process_group
from protosteer.util.files import read_regular, write_and_hold
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

SECONDS = 30.0

State = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and plain data


class CheckpointFile:
    """A file for the state of one training; rank 0 writes it, at most every `seconds`."""

    def __init__(self, path: Path, seconds: float = SECONDS):
        self.path = path
        self.seconds = seconds
        self._last = time.monotonic()
        self._lock: FileIO | None = None  # the file: open and locked while it is in use

    def is_due(self) -> bool:
        """Return whether it is time to save."""
        return process_group().is_rank0 and time.monotonic() - self._last >= self.seconds

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Replace the file atomically."""
        lock = write_and_hold(self.path, pack_tensors(about, tensors))
        self.release()
        self._lock, self._last = lock, time.monotonic()

    def load(self) -> State | None:
        """Return the last saved state of rank 0, on every rank; None if there is no file, or a damaged one."""
        state: State | None = process_group().broadcast_object(self._read)
        return state

    def _read(self) -> State | None:
        if not self.path.exists():
            return None
        try:
            about, tensors = unpack_tensors(read_regular(self.path), str(self.path))
        except (OSError, ModelFileError):
            warnings.warn(
                f"{self.path} is damaged and is skipped; its training starts over", ProtosteerWarning, stacklevel=2
            )
            return None
        return tensors, about

    def seconds_spent(self) -> float:
        """Return how long the saved training had taken."""
        state = self.load()
        return float(state[1]["seconds"]) if state else 0.0

    def release(self) -> None:
        """Unlock the file: from now on it may be removed as a leftover."""
        if self._lock:
            self._lock.close()

    def clear(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.release()
