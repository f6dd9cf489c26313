"""Change the served model and its file together: a change is written before any request sees it.

Predictions use the current snapshot and never wait for a change; changes wait for each other.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from protosteer.corrections import ImageFile, confirm, correct
from protosteer.errors import LearnerError, ModelFileError
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.model.transaction import transaction
from protosteer.model.unlearning import Forgotten, forget, undo
from protosteer.rules import Reader, reader_of
from protosteer.serve.limits import RequestError, stopping_error
from protosteer.serve.schemas import Corrected
from protosteer.serve.served_model import Snapshot
from protosteer.util.files import identity, real
from protosteer.workflows.model_summary import correction

LAST = "last"  # id of the last correction
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class OutdatedError(Exception):
    """The records that a training started from have changed."""


class Store:
    """Hold the current snapshot of a model, and apply changes to it and its file."""

    def __init__(self, learner: Learner, path: Path, writable: bool, thumbnails: bool = False):
        self.path = real(path)
        self._identity = identity(self.path)
        if writable:
            _check_same(learner.memory, self.path)
        self._thumbnails = thumbnails
        self.current = Snapshot(learner.copy(), self.path, thumbnails)
        self._lock = threading.Lock()
        self._stopping = False
        self._outdated: Snapshot | None = None  # the current snapshot, if its reader must be refitted
        self._refitting: threading.Thread | None = None
        if not writable:
            self.current.learner.reader.release()

    def stop(self) -> None:
        """Reject requested changes that have not begun. Return at once."""
        self._stopping = True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other change is under way; raise `RequestError` 503 if the service stops meanwhile."""
        with self._lock:
            if self._stopping:
                raise stopping_error()
            yield

    def check_trainable(self, name: str) -> None:
        """Raise `RequestError` 422 if a class would get no prompt of its own."""
        settings = self.current.learner.settings
        if self.current.trainable(name):
            return
        reason = "keeps its tasks independent"
        if self.current.trainable():
            reason = f"knows '{name}' already, and more images of it need no prompt"
        elif not settings.prompts:
            reason = "has no prompts"
        elif settings.prompt_tasks == "first":
            reason = "has one shared prompt"
        raise RequestError(422, f"this model {reason}, so that there is nothing to train; leave out train")

    def add(self, name: str, pixels: Tensor, image_bytes: int) -> TaskRecord:
        """Learn a class, or more images of a known one, from pixels [n, 3, h, w]; return its record."""
        with self._turn():
            record = self.current.learner.copy().add_class(name, pixels)
            metadata = dataclasses.replace(record.metadata, image_bytes=image_bytes)
            record = dataclasses.replace(record, metadata=metadata)
            self._change(Memory([*self.current.memory.tasks, record]))
            return record

    def correct(self, name: str, pixels: Tensor, file: ImageFile) -> Corrected:
        """Correct the label of one image [3, h, w] to a known or new class."""
        with self._turn():
            learner = self.current.learner.copy()
            is_new = name not in learner.classes
            outcome = correct(learner, pixels[None], name, file)
            self._change(learner.memory, outcome.reader)
            place = int(outcome.probabilities.argmax())
            answer = {"answer": outcome.reader.index.classes[place], "probability": float(outcome.probabilities[place])}
            return Corrected.model_validate({**correction(outcome.record), "new_class": is_new, **answer})

    def confirm(self, pixels: Sequence[Tensor], files: Sequence[ImageFile]) -> list[TaskRecord]:
        """Learn images [3, h, w], each as the class that is predicted for it; return their records."""
        with self._turn():
            learner = self.current.learner.copy()
            records = confirm(learner, [image[None] for image in pixels], files)
            self._change(learner.memory, self.current.learner.reader)  # the old reader serves until it is refitted
            return records

    def undo(self, id: str) -> TaskRecord:
        """Undo a correction by its id; `LAST` means the last one. Return its record."""
        with self._turn():
            memory = Memory(self.current.memory.tasks)
            try:
                record = undo(memory, None if id == LAST else id)
            except LearnerError as error:
                raise RequestError(404, str(error)) from error
            _check_not_empty(memory, record.class_names[0])
            self._change(memory)
            return record

    def forget(self, name: str) -> Forgotten:
        """Forget a class; return what was removed and what that guarantees."""
        with self._turn():
            memory = Memory(self.current.memory.tasks)
            if name not in memory.classes:
                raise RequestError(404, f"no class is named '{name}'; GET /classes lists them")
            forgotten = forget(memory, name)
            _check_not_empty(memory, name)
            self._change(memory)
            return forgotten

    def replace(self, old_record: TaskRecord, new_record: TaskRecord, predecessors: tuple[TaskRecord, ...]) -> None:
        """Replace a record whose prompt was trained against its predecessors; `OutdatedError` if these have changed."""
        with self._lock:
            self.check_predecessors(old_record, predecessors)
            memory = Memory(self.current.memory.tasks)
            memory.replace(old_record, new_record)
            self._change(memory)

    def predecessors(self, record: TaskRecord) -> tuple[TaskRecord, ...]:
        """Return the records before this one; raise `RequestError` 404 if it was deleted."""
        tasks = self.current.memory.tasks
        if record not in tasks:
            raise RequestError(404, f"class '{record.class_names[0]}' was deleted meanwhile")
        return tasks[: tasks.index(record)]

    def check_predecessors(self, record: TaskRecord, predecessors: tuple[TaskRecord, ...]) -> None:
        """Raise `OutdatedError` if the records before this one are not `predecessors`."""
        if self.predecessors(record) != predecessors:
            raise OutdatedError

    def _change(self, memory: Memory, reader: Reader | None = None) -> None:
        """Write a memory and serve it with a new reader, or at once with `reader` until the background fits a new one."""
        learner = self.current.learner.copy()
        learner.memory = memory
        if reader is not None:
            learner.use_reader(reader)
        snapshot = Snapshot(learner, self.path, self._thumbnails, self.current.projection)
        try:
            with transaction(self.path, "serve") as change:
                if change.identity != self._identity:
                    raise RequestError(409, f"the model file {self.path.name} changed on disk; restart the service")
                change.before = self.current.memory.tasks
                change.put(learner.model)
            self._identity = change.identity
        except OSError as error:
            status = 507 if error.errno in _NO_SPACE else 500
            raise RequestError(
                status, f"{self.path.name} cannot be written ({error.strerror or error}); nothing was changed"
            ) from error
        self.current = snapshot
        self._outdated = snapshot if reader is not None else None
        if reader is not None and self._refitting is None:
            self._refitting = threading.Thread(target=self._refit, name="refit", daemon=True)
            self._refitting.start()

    def _refit(self) -> None:
        """Build the reader of the current snapshot from its memory alone, as loading its file would."""
        while True:
            with self._lock:
                outdated = None if self._stopping else self._outdated
                if outdated is None:
                    self._refitting = None
                    return
            try:
                learner = outdated.learner.copy()
                learner.use_reader(reader_of(outdated.memory, learner.settings))
                snapshot = Snapshot(learner, self.path, self._thumbnails, outdated.projection)
            except BaseException:
                with self._lock:
                    self._refitting = None  # the next correction tries again
                raise
            with self._lock:
                if self._outdated is outdated:
                    self.current, self._outdated = snapshot, None

    def settle(self, seconds: float | None = None) -> None:
        """Wait until the reader of the current snapshot is fitted."""
        if (refitting := self._refitting) is not None:
            refitting.join(seconds)


def _check_not_empty(memory: Memory, name: str) -> None:
    if not len(memory):
        raise RequestError(409, f"'{name}' is the only class, and a model needs one; add another first")


def _check_same(memory: Memory, path: Path) -> None:
    """Check that the file still holds the model: it may have changed while weights were read."""
    file_model = model_file.read(path)
    if dataclasses.replace(file_model, memory=memory).pack() != file_model.pack():
        message = f"{path} does not hold the model that is to be served; load it again"
        raise ModelFileError(message, code="other-model", path=path)
