"""Training that is under way, kept in one file, so that a process that was killed can go on where it was.

Which steps are kept is a question of time and changes nothing: a training that goes on from any step ends in
the same bits as one that was never interrupted.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from protosteer.util.files import write_atomically

SECONDS = 30.0


class Bookmark:
    """A file for the state of one training; written at most every `seconds`."""

    def __init__(self, path: Path, seconds: float = SECONDS):
        self.path = path
        self.seconds = seconds
        self._last = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._last >= self.seconds

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Replace what was kept before, atomically."""
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_atomically(self.path, save(whole, metadata={"about": json.dumps(about)}))
        self._last = time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was kept last; None if there is nothing."""
        if not self.path.is_file():
            return None
        with safe_open(self.path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return tensors, json.loads(file.metadata()["about"])

    def seconds_spent(self) -> float:
        """How long the training that is kept here had taken."""
        if not self.path.is_file():
            return 0.0
        with safe_open(self.path, framework="pt") as file:
            return float(json.loads(file.metadata()["about"])["seconds"])

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
