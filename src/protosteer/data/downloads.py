"""Download files with resume, mirrors and checksums; unpack archives completely or not at all."""

from __future__ import annotations

import lzma
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.parse import urlsplit

from protosteer.errors import DataError
from protosteer.util.files import file_hash, open_regular
from protosteer.util.text import one_line

TIMEOUT = (10, 60)  # seconds to connect, and without a byte
CHUNK = 1 << 16  # bytes: at most so many are lost when a connection is cut
PROGRESS_LINES = 10  # per file
PROGRESS_MIN_SIZE = 20_000_000  # bytes of a file that has progress lines
MAX_RATIO, RATIO_SLACK = 50, 2**26  # an archive may unpack to RATIO times its size and SLACK bytes

Say = Callable[[str], None]
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Remote:
    """Describe a file on the network."""

    name: str
    size: int | None  # bytes, if known
    pages: tuple[str, ...]  # mirrors
    md5: str | None = None  # or its first digits
    folder: str | None = None  # the folder that is unpacked, if the file is an archive

    @property
    def urls(self) -> tuple[str, ...]:
        """Return one address per mirror."""
        return tuple(f"{page}/{self.name}" for page in self.pages)

    def describe(self) -> str:
        """Return the file's name and size, for messages."""
        return f"{self.name} ({self.size:,} bytes)" if self.size else self.name


def to_stderr(line: str) -> None:
    """Print a progress line."""
    print(line, file=sys.stderr, flush=True)


class _MirrorError(Exception):
    """One mirror failed; the next may work."""


def fetch(remote: Remote, folder: Path, say: Say = to_stderr) -> Path:
    """Download a file into a folder from the first mirror that has the correct checksum; return its path."""
    part = folder / f"{remote.name}.part"  # a later call resumes from it
    faults: list[str] = []
    for url in remote.urls:
        say(f"fetching {remote.describe()} from {_host(url)}")
        try:
            _download(url, remote, part, say)
            return part.replace(folder / remote.name)
        except _MirrorError as error:
            faults.append(str(error))
            say(str(error))
        except OSError as error:
            message = f"{folder} cannot be written to ({error}); choose another folder for data"
            raise DataError(message, code="cannot-write", path=folder) from error
    raise DataError(
        f"{remote.name} could not be fetched: {', '.join(faults)}", code="download-failed", name=remote.name
    )


def _download(url: str, remote: Remote, part: Path, say: Say) -> None:
    """Complete the partial file; start again if the checksum shows that it belongs to another file."""
    resumed = part.exists()
    while not _request(url, remote, part, say):
        say(f"the connection to {_host(url)} was cut; going on from {_size(part):,} bytes")
    actual = file_hash(part, "md5")
    if actual.startswith(remote.md5 or ""):
        return
    part.unlink()
    fault = f"{_host(url)} gives a file with md5 {actual}, not {remote.md5}"
    if not resumed:
        raise _MirrorError(fault)
    say(f"{fault}; the rest of an earlier download may be the cause, starting again")
    _download(url, remote, part, say)


def _request(url: str, remote: Remote, part: Path, say: Say) -> bool:
    """Make one request; return True if the file is complete, False if the connection was cut and more may follow."""
    import requests

    start = _size(part)
    headers = {"Accept-Encoding": "identity"}  # a compressed answer could not be resumed
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            if answer.status_code != 416:  # else nothing lies beyond what is here
                answer.raise_for_status()
                _append(answer, remote, part, say)
        return True
    except requests.RequestException as error:
        if _size(part) > start:
            return False
        raise _MirrorError(f"{_host(url)} {_reason(error)}") from error


def _append(answer: Any, remote: Remote, part: Path, say: Say) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    size, reported = remote.size or 0, 0
    with part.open("ab" if answer.status_code == 206 else "wb") as file:
        for chunk in answer.iter_content(CHUNK):
            file.write(chunk)
            step = PROGRESS_LINES * file.tell() // size if size > PROGRESS_MIN_SIZE else 0
            if reported < step < PROGRESS_LINES:
                say(f"{remote.name}: {step / PROGRESS_LINES:.0%} of {size / 1e6:.1f} MB")
                reported = step


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    return urlsplit(url).netloc


def _reason(error: Exception) -> str:
    """Summarise a network error in a few words; the library's own text runs over many lines."""
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answers HTTP {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "does not answer in time"
    return "cannot be reached"


def unpack(archive: Path, folder: str, into: Path) -> Path:
    """Unpack the archive's `folder` into `into`, completely or not at all."""
    final = into / folder
    if final.exists():
        message = f"{final} is there but is not complete; remove it and try again"
        raise DataError(message, code="incomplete-folder", path=final)
    try:
        into.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unpacking-", dir=into, ignore_cleanup_errors=True) as work:
            _extract(archive, work)
            if not Path(work, folder).is_dir():
                message = f"{archive} holds no folder {folder}; it is not the official file, fetch it again"
                raise DataError(message, code="bad-archive", path=archive)
            return Path(work, folder).rename(final)
    except (
        OSError, EOFError, RuntimeError, ValueError, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError
    ) as error:  # fmt: skip
        message = f"{archive} cannot be unpacked into {into} ({one_line(str(error))}); fetch it again, or make room"
        raise DataError(message, code="bad-archive", path=archive) from error


def _extract(archive: Path, into: str) -> None:
    """Extract an archive; reject one with paths outside `into` or with a bomb's compression ratio."""
    with open_regular(archive) as file:
        budget = MAX_RATIO * archive.stat().st_size + RATIO_SLACK
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as bundle:
                list(_check_sizes(budget, ((entry, entry.file_size) for entry in bundle.infolist())))
                bundle.extractall(into)  # drops roots and .. from names
            return
        file.seek(0)
        # Early releases of Python 3.10 and 3.11 have no filters.
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        with tarfile.open(fileobj=file) as bundle:
            bundle.extractall(into, _check_sizes(budget, ((member, member.size) for member in bundle)), **safe)


def _check_sizes(budget: int, entries: Iterable[tuple[Entry, int]]) -> Iterator[Entry]:
    """Yield an archive's entries as long as their total size is allowed."""
    for entry, size in entries:
        budget -= size
        if budget < 0:
            raise ValueError("it holds far more than its size allows")
        yield entry
