"""Change a model file under a lock, atomically.

with transaction("shop.protosteer") as change:
    model = change.read()
    forget(model.memory, "cat")
    change.put(model)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protosteer.errors import ModelFileError
from protosteer.model import file as model_file
from protosteer.model import history, thumbnails
from protosteer.model.file import Model
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.model.validation import check_model
from protosteer.util.files import STALE, identity, real, remove_leftovers, replacing


class Transaction:
    """One change of one model file, while no other process changes it; made by `transaction`.

    Attributes:
        command: What the log calls the change.
        keep: At least how many versions are kept; None: no version of this change.
        renamed: New names of classes by old names, for the log.
        before: The tasks that the file held; empty until it is read.
        forgotten: Classes that are forgotten although other tasks have them, and their task.
        cleaned: How many kept versions lost forgotten classes, too.
    """

    def __init__(self, path: Path, command: str, keep: int | None):
        self.path, self.command, self.keep = path, command, keep
        self.renamed: dict[str, str] = {}
        self.before: tuple[TaskRecord, ...] = ()
        self.forgotten: tuple[list[str], str | None] = [], None
        self.cleaned = 0
        self.identity = identity(path)  # which version is there; None if there is no file
        self._read: Model | None = None
        self._new: Model | None = None

    def read(self) -> Model:
        """Return the model of the file, which is read once; remove leftovers of killed processes."""
        if self._read is None:
            self._read = model_file.read(self.path)
            place = real(self.path)
            remove_leftovers(place.parent, place.name, older_than=STALE)
            with suppress(OSError):  # it may have been killed between the model and its thumbnails
                thumbnails.follow(place, self._read.memory)
            self.before = self._read.memory.tasks
        return self._read

    def put(self, model: Model) -> None:
        """Set the model that is written when the transaction ends."""
        self._new = model

    def commit(self) -> None:
        """Check the model, replace the file atomically, and update side files; without `put`, do nothing."""
        if self._new is None:
            return
        try:
            check_model(self._new.memory)
        except TypeError as error:
            message = f"the model for {self.path} is not valid ({error}); the file stays as it is"
            raise ModelFileError(message, code="invalid-model", path=self.path) from error
        if identity(self.path) != self.identity:  # by a program that takes no lock
            message = f"{self.path} was changed by another process meanwhile; run the same command again"
            raise ModelFileError(message, code="changed-meanwhile", path=self.path)
        tasks = self._new.memory.tasks
        lost = Memory(self.before).classes if self.before else []
        lost = sorted({*lost} - {*self._new.memory.classes} - {*self.renamed})
        keeps = self.keep is not None and not lost  # a version would bring forgotten classes back
        version = history.keep_version(self.path, self.keep or 0) if keeps else None
        names, task = self.forgotten if self.forgotten[0] else (lost, None)
        if names:  # first: after a crash, no version has what the model has not
            self.cleaned = history.forget_in_versions(self.path, names, self._new.memory.classes, task)
        try:
            self._new.write(self.path)
        except BaseException:
            history.drop_version(self.path, version)  # of a change that was not made
            raise
        self.identity = identity(self.path)
        history.log(self.path, self.command, self.before, tasks, self.renamed, version, {*lost})


@contextmanager
def transaction(path: str | Path, command: str = "change", keep: int | None = 0) -> Iterator[Transaction]:
    """Lock a model file, yield its `Transaction`, and write the change when the block ends.

    The file need not exist yet. The change is logged as `command`. `keep` is how many versions are kept at least, see
    `history`; None: none, even if the user keeps versions. If the block raises, the file stays as it is. A
    `ModelFileError` says that the new model is not valid, or that a program without locks has changed the file.
    """
    path = Path(path)
    with replacing(real(path)):
        change = Transaction(path, command, keep)
        yield change
        change.commit()
