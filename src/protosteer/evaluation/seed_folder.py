"""The files of one seed in a run folder. The process may be killed at any moment.

`seed-0/unfinished/` has what an interrupted run resumes from; it is removed when the seed is finished. Every file is
written atomically, in this order: the model of a task, predictions and embeddings of its evaluation, its row of the
matrix.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from protosteer.errors import RunError
from protosteer.evaluation.predictions import Predictions
from protosteer.model.schema import check
from protosteer.runtime.checkpoint import SECONDS, CheckpointFile
from protosteer.util.files import read_regular, remove_leftovers, write_atomically
from protosteer.util.text import one_line, printable

METRICS, CLASSES = "metrics.json", "classes.json"
MAX_ITEMS = 10**5


def table(value: Any, where: str) -> None:
    """Check that a value is a table of short values; see `model.schema.check`."""
    if type(value) is not dict or any(len(name) > 200 or len(str(one)) > 10**5 for name, one in value.items()):
        raise TypeError(f"{where} is no table of short values")


NUMBER = (-1e30, 1e30)
LOSSES = [[NUMBER, 0, MAX_ITEMS], 0, MAX_ITEMS]  # of every epoch of every training
_TRAINING = {"train_seconds": NUMBER, "losses?": LOSSES}
PERCENTAGES = [(-1e3, 1e3), 1, MAX_ITEMS]
RELIABILITY = [{"images": (0, 2**40), "confidence?": (0.0, 100.0), "accuracy?": (0.0, 100.0)}, 1, 1000]


def _numbers(value: Any, where: str) -> None:
    table(value, where)
    for name, number in value.items():
        check(number, NUMBER, f"{where} {printable(name)}")


_MAY_BE_NULL = ("prompts_per_image", "retrieval_accuracy")
_NOT_NULL = ("known_classes", "seen_accuracy", "seen_images", "paper_bytes")  # but older versions lack them
_ROW = {
    **_TRAINING,
    **dict.fromkeys(("eval_seconds", "forward_passes", "naive_forward_passes", "bytes", "trained_parameters"), NUMBER),
    **{f"{name}?": NUMBER for name in (*_MAY_BE_NULL, "next_accuracy", "passes_per_image", "calibration_error")},
    **dict.fromkeys(("known_classes?", "seen_images?"), (1, 2**40)),
    "seen_accuracy?": NUMBER,
    "accuracy": PERCENTAGES,
    "given_task_accuracy?": PERCENTAGES,
    "paper_bytes?": _numbers,
    "reliability?": RELIABILITY,
}


def _row(value: Any, where: str) -> None:
    """Check a row of the matrix; see `protocol.Run`."""
    check(value, _ROW, where)
    missing = [name for name in _MAY_BE_NULL if name not in value]
    missing += [name for name in _NOT_NULL if value.get(name, 0) is None]
    if missing:
        raise TypeError(f"{where} lacks {missing[0]}")


class SeedFolder:
    """The part of a run folder that belongs to one seed; `protocol.run_stream` resumes from it."""

    def __init__(self, path: Path, suffix: str, checkpoint_seconds: float = SECONDS):
        self.path = path
        self.suffix = suffix
        self.checkpoint_seconds = checkpoint_seconds
        self.unfinished = path / "unfinished"

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the matrix that were saved."""
        path = self.unfinished / "rows.json"
        rows = read_json(path) if path.is_file() else []
        with reading(path):
            check(rows, [_row, 0, MAX_ITEMS], "a row")
            require_triangle([row["accuracy"] for row in rows])
        return rows if self._model(len(rows) - 1).is_file() else []

    def save_rows(self, rows: list[dict[str, Any]]) -> None:
        """Save the rows of the matrix."""
        write_json(self.unfinished / "rows.json", rows)

    def learned(self, task: int) -> tuple[bytes, dict[str, Any]] | None:
        """Return the state after a task, and what its training took; None if it was not saved."""
        if not self._model(task).is_file():
            return None
        training = read_json(place := self._unfinished("learned", task))
        with reading(place):
            check(training, _TRAINING, "its")
        with reading(self._model(task)):
            return read_regular(self._model(task)), training

    def save_learned(self, task: int, state: bytes, training: Mapping[str, Any]) -> None:
        """Save the state after a task and what its training took, and remove its checkpoint."""
        write_json(self._unfinished("learned", task), training)
        write_atomically(self._model(task), state)
        self.checkpoint(task).clear()

    def copy_learned(self, finished: Path) -> None:
        """Copy the states of a finished seed, as if this one had learned them."""
        figures, other = read_json(place := finished / METRICS), SeedFolder(finished, self.suffix)
        with reading(place):
            check(figures, {"after_each_task": [_TRAINING, 1, MAX_ITEMS]}, "its")
        rows = figures["after_each_task"]
        for task, row in enumerate(rows):
            if not self._model(task).is_file():
                training = {"train_seconds": row["train_seconds"], "losses": row.get("losses") or []}
                with reading(other._model(task)):
                    state = read_regular(other._model(task))
                self.save_learned(task, state, training)

    def embeddings(self) -> list[Mapping[str, Tensor]]:
        """Return the embeddings behind the saved rows; an interrupted evaluation is repeated."""
        found: list[Mapping[str, Tensor]] = []
        for place in (self._unfinished("embeddings", task) for task in range(len(self.rows()))):
            with reading(place):
                found.append(load(read_regular(place)))
        return found

    def save_embeddings(self, task: int, embeddings: Mapping[str, Tensor]) -> None:
        """Save the embeddings of a task's evaluation."""
        whole = {name: tensor.contiguous() for name, tensor in embeddings.items()}
        write_atomically(self._unfinished("embeddings", task), save(whole))

    def predictions(self, task: int) -> Predictions:
        """Return the predictions after a task."""
        return Predictions.load(self._predictions(task))

    def save_predictions(self, task: int, predictions: Predictions) -> None:
        """Save the predictions after a task."""
        predictions.save(self._predictions(task))

    def checkpoint(self, task: int) -> CheckpointFile:
        """Return the checkpoint of a task's training."""
        return CheckpointFile(self._unfinished("training", task), self.checkpoint_seconds)

    def finish(self, figures: dict[str, Any]) -> None:
        """Write the seed's metrics, its matrix as CSV, and metrics of each class."""
        matrix = figures["matrix"]  # tasks that were not learned yet are empty
        lines: list[list[Any]] = [["after_task", *(f"task_{j + 1}" for j in range(len(matrix)))]]
        lines += [[i + 1, *row, *[""] * (len(matrix) - len(row))] for i, row in enumerate(matrix)]
        text = "".join(",".join(map(str, line)) + "\n" for line in lines)
        write_atomically(self.path / "matrix.csv", text.encode())
        write_json(self.path / CLASSES, self.predictions(len(matrix) - 1).by_class())
        write_json(self.path / METRICS, figures)

    def clean(self) -> None:
        """Remove what a finished seed does not need."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        remove_leftovers(self.path)

    def _model(self, task: int) -> Path:
        return self.path / f"task-{task + 1:02}{self.suffix}"

    def _predictions(self, task: int) -> Path:
        return self.path / f"predictions-{task + 1:02}.npz"

    def _unfinished(self, kind: str, task: int) -> Path:
        suffix = "json" if kind == "learned" else "safetensors"
        return self.unfinished / f"{kind}-{task + 1:03}.{suffix}"


def require_triangle(matrix: list[list[float]]) -> None:
    """Raise a `TypeError` unless row i of an accuracy matrix has i + 1 entries."""
    if any(len(row) != i + 1 for i, row in enumerate(matrix)):
        raise TypeError("its matrix is not triangular")


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder."""
    with reading(path):
        return json.loads(read_regular(path))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error about the content of a file into a `RunError` that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, RecursionError, SafetensorError) as error:
        message = f"{path} cannot be read ({one_line(str(error))}); the folder was altered"
        raise RunError(message, code="unreadable-run", path=path) from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())
