"""Change a model file so that no change is lost and none is half made.

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
        keep: How many versions the change keeps at least; None: no version at all.
        renamed: New names of classes by old names, for the log.
        before: The tasks that the file held; known once it is read.
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
        """Return what the file holds; it is read once. What a killed change left beside it goes."""
        if self._read is None:
            self._read = model_file.read(self.path)
            place = real(self.path)
            remove_leftovers(place.parent, place.name, older_than=STALE)
            with suppress(OSError):  # it may have been killed between the model and its thumbnails
                thumbnails.follow(place, self._read.memory)
            self.before = self._read.memory.tasks
        return self._read

    def put(self, model: Model) -> None:
        """Let the file hold this model when the transaction ends."""
        self._new = model

    def commit(self) -> None:
        """Write what was put: check it, replace the file at once, and let side files follow."""
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
        after = self._new.memory.tasks
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
        history.log(self.path, self.command, self.before, after, self.renamed, version, {*lost})


@contextmanager
def transaction(path: str | Path, command: str = "change", keep: int | None = 0) -> Iterator[Transaction]:
    """Lock a model file, give it to be read and changed, and write the change when the block ends.

    The change is logged as `command`. `keep` is how many versions it keeps at least, see `history`; None: none, also
    if the user wants versions. If the block raises, the file stays as it is. It need not exist yet. A `ModelFileError`
    says that the new model is not valid, or that a program without locks has changed the file meanwhile.
    """
    path = Path(path)
    with replacing(real(path)):
        change = Transaction(path, command, keep)
        yield change
        change.commit()
