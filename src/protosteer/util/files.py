"""Atomic writes, locks, leftovers of dead processes, and safe reading of files that a user names."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from protosteer.errors import ProtosteerError, ProtosteerWarning

if sys.platform != "win32":
    import fcntl

_TEMPORARY, _CHECKPOINT = ".tmp", ".part"
_NEW, _OLD = "new", "old"  # in the hidden folder of `replace_folder`
# Seconds after which a file that cannot be locked counts as abandoned: a file in use is written to more often.
STALE = 3600.0


def cache_dir() -> Path:
    """Return the folder of downloads, which also holds files that a user puts there by hand."""
    return Path(os.environ.get("PROTOSTEER_CACHE") or Path.home() / ".cache" / "protosteer").expanduser()


def write_atomically(path: Path, data: bytes, like: Path | None = None) -> None:
    """Replace the file at `path` with `data`: write a temporary file beside it, sync, rename, sync the folder.

    The file keeps its owner and permissions; a new one has those of `like`, or the usual ones.
    """
    write_and_hold(path, data, like).close()


def write_and_hold(path: Path, data: bytes, like: Path | None = None) -> FileIO:
    """Replace the file at `path` with `data`, and hold a lock on it until the returned file is closed."""
    with _replacement(path, like) as file:
        remainder = memoryview(data)
        while remainder:
            remainder = remainder[os.write(file.fileno(), remainder) :]
    return file


@contextlib.contextmanager
def growing(path: Path) -> Iterator[FileIO]:
    """Yield a temporary file that replaces `path` when the block ends, and is removed if the block fails."""
    with _replacement(path) as file:
        yield file
    file.close()


@contextlib.contextmanager
def _replacement(path: Path, like: Path | None = None) -> Iterator[FileIO]:
    """Yield a temporary file as `growing` does, but leave it open afterwards: it is locked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _temporaries(path.parent, path.name):
        _remove_dead(leftover)
    file, temporary = _new_temporary(path)
    try:
        yield file
        os.fsync(file.fileno())
        _set_access(temporary, path, like)
        if sys.platform == "win32":  # which renames no open file
            file.close()
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def copy_synced(source: Path, target: Path) -> None:
    """Copy a file with its times and permissions: write it beside `target`, sync, rename, sync the folder."""
    part = target.with_name(f".{target.name}.part")
    with open_regular(source) as source_file, part.open("wb") as target_file:
        shutil.copyfileobj(source_file, target_file)
        target_file.flush()
        os.fsync(target_file.fileno())
    shutil.copystat(source, part)
    os.replace(part, target)
    sync_folder(target.parent)


def move_synced(source: Path, target: Path) -> None:
    """Move a file, also to another disk; after a power cut it is complete at one place or the other."""
    try:
        os.replace(source, target)
        sync_folder(target.parent)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy_synced(source, target)
        source.unlink()


def sync_folder(path: Path) -> None:
    """Sync the names in a folder, where the system can."""
    with contextlib.suppress(OSError), _open_folder(path) as folder:  # some file systems cannot sync a folder
        if folder is not None:
            os.fsync(folder)


def _new_temporary(path: Path) -> tuple[FileIO, str]:
    """Create a locked file beside `path`; retry if another process removed it before the lock was taken."""
    while True:
        prefix = f".{path.name.lstrip('.')}."
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=_TEMPORARY)
        if _try_lock(handle) is not False and os.fstat(handle).st_nlink:
            return FileIO(handle, "wb"), name
        os.close(handle)


@contextlib.contextmanager
def writing(place: Path, option: str | None) -> Iterator[None]:
    """Turn an `OSError` of the block into `cannot-write`; `option` is the command-line option for another place."""
    try:
        yield
    except OSError as error:
        remedy = f"choose another place with {option}" if option else "free some space, or check its permissions"
        raise ProtosteerError(
            f"cannot write to {place}: {error.strerror or error}; {remedy}", code="cannot-write", path=place
        ) from error


def replace_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace a folder by one with these files: at any moment the old or the new one is there, complete.

    The new one is built in a hidden folder beside it, which is locked and removed at the end. Hidden folders of killed
    processes are removed. If the system cannot exchange folders, an old one that was moved away is moved back first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        _remove_dead_folder(leftover, folder)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    with _open_folder(work) as lock:
        if lock is not None:
            _try_lock(lock)
        try:
            new_folder, old_folder = work / _NEW, work / _OLD
            new_folder.mkdir()
            for name, data in contents.items():
                write_atomically(new_folder / name, data)
            _set_access(new_folder, folder)
            if not folder.exists():
                new_folder.rename(folder)
            elif not _exchange(new_folder, folder):
                folder.rename(old_folder)
                try:
                    new_folder.rename(folder)
                except BaseException:
                    old_folder.rename(folder)
                    raise
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; return False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return False
    current_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(current_folder, os.fsencode(a), current_folder, os.fsencode(b), exchange) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(b))


def _remove_dead_folder(leftover: Path, folder: Path) -> None:
    """Remove a hidden folder of `replace_folder` that no process has locked; return an old folder to its place."""
    with contextlib.suppress(OSError):
        if leftover.is_symlink() or not {entry.name for entry in leftover.iterdir()} <= {_NEW, _OLD}:
            return
        with _open_folder(leftover) as lock:
            dead = _try_lock(lock) if lock is not None else None
            if dead is False or (dead is None and time.time() - leftover.stat().st_mtime < STALE):
                return
            if (leftover / _OLD).exists() and not folder.exists():
                (leftover / _OLD).rename(folder)
            shutil.rmtree(leftover)


def remove_leftovers(folder: Path, name: str | None = None, older_than: float = 0.0) -> list[Path]:
    """Remove leftovers of dead processes of file `name` (None: of all files); return those that living processes hold.

    Checkpoints stay for `older_than` seconds, so that learning can resume. Temporary files are removed at once.
    """
    checkpoints = folder.glob(f".{'*' if name is None else glob.escape(name)}.*{_CHECKPOINT}")
    leftovers = dict.fromkeys(_temporaries(folder, name), 0.0) | dict.fromkeys(checkpoints, older_than)
    for path, age in leftovers.items():
        _remove_dead(path, age)
    return [path for path in leftovers if path.exists()]


def _temporaries(folder: Path, name: str | None) -> list[Path]:
    stem = "*" if name is None else glob.escape(name.lstrip("."))
    return list(folder.glob(f".{stem}.*{_TEMPORARY}"))


def _remove_dead(path: Path, older_than: float = 0.0) -> None:
    """Remove a file that no process has locked; if the system has no locks, a file that is old."""
    with contextlib.suppress(OSError):
        with open_regular(path) as file:
            free, status = _try_lock(file.fileno()), os.fstat(file.fileno())
            age = max(0.0, time.time() - status.st_mtime)  # negative if the clock was set back
            # The name may now belong to another file than the one that was locked.
            if free and age >= older_than and os.path.samestat(status, path.stat()):
                path.unlink()
        if free is None and age >= max(older_than, STALE):
            path.unlink()


def _try_lock(handle: int) -> bool | None:
    """Return True if the lock on an open file was taken, None where the system or file system has no locks."""
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
    """Hold an exclusive lock, across processes and threads, from reading the old file to renaming the new one.

    The folder is locked, so that no lock file stays behind.
    """
    if not path.parent.is_dir():  # there is no file that could be lost
        yield
        return
    end = time.monotonic() + seconds
    with _open_folder(path.parent) as folder:
        while (locked := None if folder is None else _try_lock(folder)) is False:
            if time.monotonic() > end:
                message = (
                    f"someone else has been writing in {path.parent} for {seconds:g} s; wait for that and run the "
                    "same command again"
                )
                raise ProtosteerError(message, code="locked", path=path.parent)
            time.sleep(0.01)
        if locked is None:
            warnings.warn(
                f"{path.parent} cannot be locked; do not write to {path.name} from two programs at once",
                ProtosteerWarning,
                stacklevel=3,
            )
        yield


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int | None]:
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
    """Resolve links, so that a write replaces the target and the link stays one; raise with code `link-loop`."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ProtosteerError(
                f"{path} is a link that leads back to itself; remove it", code="link-loop", path=path
            ) from error
    return path.resolve()


def identity(path: Path) -> tuple[int, ...] | None:
    """Return a value that differs between versions of a file; None if there is no file, or it cannot be reached."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _set_access(path: str | Path, *models: Path | None) -> None:
    """Give a new file or folder the owner and permissions of the first model that exists, or the usual ones."""
    model = next((candidate for candidate in models if candidate is not None and candidate.exists()), None)
    if model is None:
        os.chmod(path, (0o777 if os.path.isdir(path) else 0o666) & ~_umask())
        return
    status = os.stat(model)
    if sys.platform != "win32" and (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(OSError):  # only root can give a file away, only to one's groups can others
            os.chown(path, status.st_uid if os.geteuid() == 0 else -1, status.st_gid)
    os.chmod(path, stat.S_IMODE(status.st_mode))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; never wait for a pipe or a device. Raises `OSError` for anything else.

    The file is checked before it is opened, because opening a pipe can wait, and again afterwards, because it
    may have been exchanged in between.
    """
    _require_regular(os.stat(path), path)
    file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115 (the caller closes it)
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: str | Path) -> bytes:
    """Return the content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def digest(content: bytes) -> int:
    """Hash a file's content to a signed 64-bit integer, which fits into a tensor."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)


def file_hash(path: Path, algorithm: str) -> str:
    """Hash a file of any size; `algorithm` is a name known to hashlib. Returns the digits of the digest."""
    state = hashlib.new(algorithm, usedforsecurity=False)
    with open_regular(path) as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _require_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
