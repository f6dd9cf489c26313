"""Files that are whole or not there: nothing a user had is ever lost or half-written."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from protosteer.errors import ProtosteerError, ProtosteerWarning
from protosteer.util.reading import open_regular

if sys.platform != "win32":
    import fcntl

_TEMPORARY, _BOOKMARK = ".tmp", ".part"
# Seconds after which a file that nobody can lock, or of a learning that was stopped, is of no use: one that is in
# use is written to much more often.
STALE = 3600.0


def cache_dir() -> Path:
    """Where protosteer keeps what it downloads, and looks for files that were put there by hand."""
    return Path(os.environ.get("PROTOSTEER_CACHE") or Path.home() / ".cache" / "protosteer").expanduser()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` with `data`: temporary file beside it, synced, renamed, folder synced."""
    write_and_hold(path, data).close()


def write_and_hold(path: Path, data: bytes) -> FileIO:
    """The same. Until the result is closed, a lock on the new file tells others that its writer lives."""
    file, temporary = _begin(path)
    try:
        _write_all(file.fileno(), data)
        _put_in_place(file, temporary, path)
    except BaseException:
        _give_up(file, temporary)
        raise
    return file


@contextlib.contextmanager
def growing(path: Path) -> Iterator[FileIO]:
    """A file to write to, bit by bit, which takes the place of `path` when the block ends, or is gone if it fails."""
    file, temporary = _begin(path)
    try:
        yield file
        _put_in_place(file, temporary, path)
    except BaseException:
        _give_up(file, temporary)
        raise
    file.close()


def _begin(path: Path) -> tuple[FileIO, str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _temporaries(path.parent, path.name):
        _remove_dead(leftover)
    return _new_temporary(path)


def _put_in_place(file: FileIO, temporary: str, path: Path) -> None:
    os.fsync(file.fileno())
    os.chmod(temporary, _mode(path))
    if sys.platform == "win32":  # which renames no open file
        file.close()
    os.replace(temporary, path)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _give_up(file: FileIO, temporary: str) -> None:
    file.close()
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def _new_temporary(path: Path) -> tuple[FileIO, str]:
    """A locked file beside `path`. Whoever removes leftovers may have taken it for one before it was locked."""
    while True:
        prefix = f".{path.name.lstrip('.')}."
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=_TEMPORARY)
        if _try_lock(handle) is not False and os.fstat(handle).st_nlink:
            return FileIO(handle, "wb"), name
        os.close(handle)


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


@contextlib.contextmanager
def writing(place: Path, option: str | None) -> Iterator[None]:
    """What the system refuses to write becomes a line for the user. option: what names another place."""
    try:
        yield
    except OSError as error:
        remedy = f"choose another place with {option}" if option else "make room, or see to its permissions"
        raise ProtosteerError(
            f"cannot write to {place}: {error.strerror or error}; {remedy}", code="cannot-write", path=place
        ) from error


def remove_leftovers(folder: Path, name: str | None = None, older_than: float = 0.0) -> list[Path]:
    """Remove what dead processes left behind for a file of that name, or for any; gives what had to stay.

    Temporary files go at once. older_than: seconds for which a checkpoint is kept, with which learning could go
    on.
    """
    checkpoints = folder.glob(f".{'*' if name is None else glob.escape(name)}.*{_BOOKMARK}")
    found = [(path, 0.0) for path in _temporaries(folder, name)] + [
        (path, older_than) for path in checkpoints
    ]
    for path, age in found:
        _remove_dead(path, age)
    return [path for path, _ in found if path.exists()]


def _temporaries(folder: Path, name: str | None) -> list[Path]:
    stem = "*" if name is None else glob.escape(name.lstrip("."))
    return list(folder.glob(f".{stem}.*{_TEMPORARY}"))


def _remove_dead(path: Path, older_than: float = 0.0) -> None:
    """A file whose lock can be had belongs to nobody; without locks, one that is old."""
    with contextlib.suppress(OSError):
        with open_regular(path) as file:
            free, status = _try_lock(file.fileno()), os.fstat(file.fileno())
            age = time.time() - status.st_mtime
            # By now the name may be that of another file, which is not the one that was locked.
            if free and age >= older_than and os.path.samestat(status, path.stat()):
                path.unlink()
        if free is None and age >= max(older_than, STALE):
            path.unlink()


def _try_lock(handle: int) -> bool | None:
    """Whether the lock on an open file is ours now; None where the system or the file system has no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def replacing(path: Path, seconds: float = 30.0) -> Iterator[None]:
    """One at a time, of all processes and threads: from the look at the old file to the rename of the new one.

    It is the folder that is locked, so that no lock file stays behind. seconds: to wait for others.
    """
    if not path.parent.is_dir():  # nothing is there that could be lost
        yield
        return
    end = time.monotonic() + seconds
    with _opened_folder(path.parent) as folder:
        while (ours := None if folder is None else _try_lock(folder)) is False:
            if time.monotonic() > end:
                raise ProtosteerError(
                    f"someone else has been writing in {path.parent} for {seconds:g} s; wait for that and run the "
                    "same command again",
                    code="locked",
                    path=path.parent,
                )
            time.sleep(0.01)
        if ours is None:
            warnings.warn(
                f"{path.parent} cannot be locked; let nobody else write to {path.name} at the same time",
                ProtosteerWarning,
                stacklevel=3,
            )
        yield


@contextlib.contextmanager
def _opened_folder(path: Path) -> Iterator[int | None]:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def real(path: Path) -> Path:
    """Where a link leads: that file is replaced, so that the link stays one."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ProtosteerError(
                f"{path} is a link that leads back to itself; remove it", code="link-loop", path=path
            ) from error
    return path.resolve()


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
