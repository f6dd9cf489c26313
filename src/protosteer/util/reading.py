"""Reading files that someone names: regular ones only, since a pipe or a device may never answer."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading. What is not a regular file is an `OSError` at once, also if it just became one.

    Looked at before it is opened, because opening alone can wait or do something (pipes, devices), and once more
    afterwards, because it may have been exchanged in between.
    """
    _require_regular(os.stat(path), path)
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 (whoever asked closes it)
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: str | Path) -> bytes:
    """All of a regular file."""
    with open_regular(path) as file:
        return file.read()


def digest(content: bytes) -> int:
    """What tells one file's content from another's: a whole number of 64 bits, with a sign as tensors have it."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _require_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
