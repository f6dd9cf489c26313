"""The model that is served, and its file. A change is written before anybody sees it, or it does not happen.

Predictions take the current snapshot and never wait for a change; changes wait for each other.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
from pathlib import Path

from torch import Tensor

from protosteer.errors import LearnerError, ModelFileError
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.model.transaction import transaction
from protosteer.model.unlearning import Forgotten, forget, undo
from protosteer.serve.limits import RequestError
from protosteer.serve.schemas import Corrected
from protosteer.serve.served_model import Snapshot
from protosteer.util.files import Identity, real
from protosteer.workflows.model_summary import correction

LAST = "last"  # stands for the name of the last correction
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class OutdatedError(Exception):
    """What a training began with is not what is there now."""


class Store:
    def __init__(self, learner: Learner, path: Path, writable: bool, thumbnails: bool = False):
        self.path = real(path)
        self._identity = Identity.of(self.path)
        if writable:
            _check_same(learner.memory, self.path)
        self._thumbnails = thumbnails
        self.current = Snapshot(learner.copy(), self.path, thumbnails)
        self._lock = threading.Lock()

    def check_trainable(self, name: str) -> None:
        """A prompt sets a class apart from those before it; without any there is nothing to train."""
        settings = self.current.learner.settings
        if self.current.trainable(name):
            return
        why = "keeps its tasks independent"
        if self.current.trainable():
            why = f"knows '{name}' already, and more images of it need no prompt"
        elif not settings.prompts:
            why = "has no prompts"
        elif settings.prompt_tasks == "first":
            why = "has one prompt for all classes"
        raise RequestError(422, f"this model {why}, so that there is nothing to train; leave out train")

    def add(self, name: str, pixels: Tensor, image_bytes: int) -> TaskRecord:
        """A new class, or more of one, from a few images [n, 3, h, w]."""
        with self._lock:
            record = self.current.learner.copy().add_class(name, pixels)
            about = dataclasses.replace(record.metadata, image_bytes=image_bytes)
            record = dataclasses.replace(record, metadata=about)
            self._change(Memory([*self.current.memory.tasks, record]))
            return record

    def correct(self, name: str, pixels: Tensor, content: bytes, file: str) -> Corrected:
        """One image [3, h, w], told what it is. content, file: of the file it came in, and its name."""
        with self._lock:
            learner = self.current.learner.copy()
            new = name not in learner.classes
            record = learner.correct(pixels[None], name, content)
            about = dataclasses.replace(record.metadata, image_bytes=len(content), file=file)
            learner.memory.replace(record, told := dataclasses.replace(record, metadata=about))
            self._change(learner.memory)
            ((answer, probability, _),) = self.current.learner.predict(pixels[None]).ranked(1)[0]
            now = {"new_class": new, "answer": answer, "probability": probability}
            return Corrected.model_validate({**correction(told), **now})

    def undo(self, id: str) -> TaskRecord:
        """Take a correction back, by its name or as the last one."""
        with self._lock:
            memory = Memory(self.current.memory.tasks)
            try:
                record = undo(memory, None if id == LAST else id)
            except LearnerError as error:
                raise RequestError(404, str(error)) from error
            _check_rest(memory, record.class_names[0])
            self._change(memory)
            return record

    def forget(self, name: str) -> Forgotten:
        with self._lock:
            memory = Memory(self.current.memory.tasks)
            if name not in memory.classes:
                raise RequestError(404, f"no class is named '{name}'; GET /classes lists them")
            forgotten = forget(memory, name)
            _check_rest(memory, name)
            self._change(memory)
            return forgotten

    def replace(self, old: TaskRecord, new: TaskRecord, before: tuple[TaskRecord, ...]) -> None:
        """In place, which tells what others a record's prompt was trained against: those before it."""
        with self._lock:
            self.check_before(old, before)
            memory = Memory(self.current.memory.tasks)
            memory.replace(old, new)
            self._change(memory)

    def before(self, record: TaskRecord) -> tuple[TaskRecord, ...]:
        """The records that stand before this one, which must still be there."""
        tasks = self.current.memory.tasks
        if record not in tasks:
            raise RequestError(404, f"class '{record.class_names[0]}' was deleted meanwhile")
        return tasks[: tasks.index(record)]

    def check_before(self, record: TaskRecord, before: tuple[TaskRecord, ...]) -> None:
        if self.before(record) != before:
            raise OutdatedError

    def _change(self, memory: Memory) -> None:
        learner = self.current.learner.copy()
        learner.memory = memory
        following = Snapshot(learner, self.path, self._thumbnails)
        try:
            with transaction(self.path) as change:
                if change.identity != self._identity:
                    raise RequestError(
                        409, f"the model file {self.path.name} changed on disk; restart the service"
                    )
                change.put(learner.model)
            self._identity = change.identity
        except OSError as error:
            status = 507 if error.errno in _NO_SPACE else 500
            raise RequestError(
                status, f"{self.path.name} cannot be written ({error.strerror or error}); nothing was changed"
            ) from error
        self.current = following


def _check_rest(memory: Memory, gone: str) -> None:
    if not len(memory):
        raise RequestError(409, f"'{gone}' is the only class, and a model needs one; add another first")


def _check_same(memory: Memory, path: Path) -> None:
    """The file may have changed after it was loaded: reading weights takes a while."""
    on_disk = model_file.read(path)
    if dataclasses.replace(on_disk, memory=memory).pack() != on_disk.pack():
        raise ModelFileError(
            f"{path} does not hold the model that is to be served; load it again",
            code="other-model",
            path=path,
        )
