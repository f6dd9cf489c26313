"""Training that is under way, kept in one file, so that a process that was killed can go on where it was.

Which steps are kept is a question of time and changes nothing: a training that goes on from any step ends in
the same bits as one that was never interrupted.
"""

from __future__ import annotations

import time
import warnings
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.errors import ModelFileError, ProtosteerWarning, TrainingError
from protosteer.util.distributed import process_group
from protosteer.util.files import read_regular, write_and_hold
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.util.text import one_line
from protosteer.util.training_state import TrainingState

SECONDS = 30.0


class CheckpointFile:
    """A file for the state of one training; written at most every `seconds`."""

    def __init__(self, path: Path, seconds: float = SECONDS):
        self.path = path
        self.seconds = seconds
        self._last = time.monotonic()
        self._held: FileIO | None = None  # what was saved last: open, and locked, as long as it is in use

    def due(self) -> bool:
        return process_group().is_rank0 and time.monotonic() - self._last >= self.seconds

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Replace what was kept before, atomically."""
        held = write_and_hold(self.path, pack_tensors(about, tensors))
        self.release()
        self._held, self._last = held, time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was kept last, by rank 0; None if there is nothing, or nothing whole."""
        found: tuple[dict[str, Tensor], dict[str, Any]] | None = process_group().broadcast_object(self._read)
        return found

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.path.exists():
            return None
        try:
            about, tensors = unpack_tensors(read_regular(self.path), str(self.path))
        except (OSError, ModelFileError):
            warnings.warn(
                f"{self.path} is damaged and is left out; the training that was kept there starts over",
                ProtosteerWarning,
                stacklevel=2,
            )
            return None
        return tensors, about

    def seconds_spent(self) -> float:
        """How long the training that is kept here had taken."""
        kept = self.load()
        return float(kept[1]["seconds"]) if kept else 0.0

    def release(self) -> None:
        """Nobody trains this any more: from now on it may be removed as a leftover."""
        if self._held:
            self._held.close()

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
        self.release()


class CheckpointCallback:
    """A callback that keeps a training in a checkpoint and, at its beginning, goes on with what is kept there.

    which: tells one training from another, as plain data; what was kept of another is left alone.
    """

    def __init__(self, checkpoint: CheckpointFile, which: dict[str, Any]):
        self.checkpoint = checkpoint
        self.which = which
        self.earlier = 0.0  # seconds that interrupted processes have spent
        self.began = time.perf_counter()

    def on_train_begin(self, training: TrainingState) -> None:
        kept = self.checkpoint.load()
        if kept is None or kept[1].get("which") != self.which:
            return
        tensors, about = kept
        try:
            training.load_state_dict(tensors, about["notes"])
            for name, parameter in training.parameters.items():
                parameter.data.copy_(tensors[name])
                moments = {key: tensors[f"{name}/{key}"] for key in about["moments"]}
                training.optimiser.state[parameter] = {
                    key: value.float().reshape(())
                    if key == "step"
                    else torch.empty_like(parameter).copy_(value)
                    for key, value in moments.items()
                }
            torch.set_rng_state(tensors["rng"])
            self.earlier = float(about["seconds"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(
                f"{self.checkpoint.path} does not hold what this training needs ({one_line(str(error))}); remove it"
            ) from error

    def on_step_end(self, training: TrainingState) -> None:
        if self.checkpoint.due():
            self.keep(training)

    def keep(self, training: TrainingState) -> None:
        """Between two steps; `on_train_begin` gives the same state to the bit."""
        tensors, notes = training.state_dict()
        tensors = {**tensors, "rng": torch.get_rng_state()}
        moments: list[str] = []
        for name, parameter in training.parameters.items():
            tensors[name] = parameter.detach()
            state = training.optimiser.state[parameter]
            moments = list(state)
            tensors |= {f"{name}/{key}": value for key, value in state.items()}
        seconds = self.earlier + time.perf_counter() - self.began
        about = {"notes": notes, "moments": moments, "seconds": seconds, "which": self.which}
        self.checkpoint.save(tensors, about)
