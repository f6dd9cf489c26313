"""Files that are whole or not there: nothing a user had is ever lost or half-written."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protosteer.errors import ProtosteerError


def cache_dir() -> Path:
    """Where protosteer keeps what it downloads, and looks for files that were put there by hand."""
    return Path(os.environ.get("PROTOSTEER_CACHE") or Path.home() / ".cache" / "protosteer").expanduser()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` with `data`: temporary file beside it, synced, renamed, folder synced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(path))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def writing(place: Path, option: str | None) -> Iterator[None]:
    """What the system refuses to write becomes a line for the user. option: what names another place."""
    try:
        yield
    except OSError as error:
        remedy = f"choose another place with {option}" if option else "make room, or see to its permissions"
        raise ProtosteerError(f"cannot write to {place}: {error.strerror or error}; {remedy}") from error


def remove_leftovers(folder: Path, name: str | None = None, older_than: float = 0.0) -> None:
    """What a killed process left behind for a file of that name, or for any: temporary files and bookmarks.

    older_than: seconds that such a file must not have been written to.
    """
    stem = "*" if name is None else glob.escape(name)
    for path in [*folder.glob(f".{stem}.*.tmp"), *folder.glob(f".{stem}.*.part")]:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= older_than:
                path.unlink()


@dataclass(frozen=True)
class Identity:
    """Tells whether a file is still the one that was read."""

    content: tuple[int, ...] | None

    @classmethod
    def of(cls, path: Path) -> Identity:
        try:
            status = path.stat()
        except OSError:  # it is not there, or out of reach
            return cls(None)
        return cls((status.st_ino, status.st_size, status.st_mtime_ns))


def _mode(path: Path) -> int:
    """Permissions: those that the file has, so that a private one stays private, or the usual ones."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0o666 & ~_umask()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
