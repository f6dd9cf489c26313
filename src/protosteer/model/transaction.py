"""Change a model file so that nobody's change is lost, and nothing is half made.

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
from protosteer.model import thumbnails
from protosteer.model.file import Model
from protosteer.model.validation import check_model
from protosteer.util.files import STALE, Identity, real, remove_leftovers, replacing


class Transaction:
    """One change of one model file, while nobody else changes it; made by `transaction`."""

    def __init__(self, path: Path):
        self.path = path
        self.identity = Identity.of(path)  # which version is there; its `content` is None if there is no file
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
        if Identity.of(self.path) != self.identity:  # by a program that takes no lock
            message = f"{self.path} was changed by another process meanwhile; run the same command again"
            raise ModelFileError(message, code="changed-meanwhile", path=self.path)
        self._new.write(self.path)
        self.identity = Identity.of(self.path)


@contextmanager
def transaction(path: str | Path) -> Iterator[Transaction]:
    """Lock a model file, give it to be read and changed, and write the change when the block ends.

    If the block raises, the file stays as it is. It need not exist yet. A `ModelFileError` says that the new model is
    not valid, or that a program without locks has changed the file meanwhile.
    """
    path = Path(path)
    with replacing(real(path)):
        change = Transaction(path)
        yield change
        change.commit()
