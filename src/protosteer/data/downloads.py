"""Downloads that can be cut, resumed and trusted, and archives unpacked so that nothing is ever half there.

pooch can neither go on with a partial file nor try the next mirror, so the fetching is done here.
"""

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
from protosteer.util.reading import open_regular
from protosteer.util.text import one_line

TIMEOUT = (10, 60)  # seconds to connect, and without a byte
CHUNK = 1 << 16  # at most so much is lost when a connection is cut
LINES = 10  # about so many tell of a file's progress
UNPACKED, UNPACKED_SLACK = 50, 2**26  # an archive may come to so many times its size, and so many bytes more
LINE_SIZE = 20_000_000  # but none of files that are smaller

Say = Callable[[str], None]
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Remote:
    """A file on the network; `folder` is what an archive holds and all that is taken of it."""

    name: str
    size: int | None  # bytes, where it is known
    pages: tuple[str, ...]  # mirrors
    md5: str | None = None
    folder: str | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"{page}/{self.name}" for page in self.pages)

    def describe(self) -> str:
        return f"{self.name} ({self.size:,} bytes)" if self.size else self.name


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Unfetched(Exception):
    """One mirror failed; the next may not."""


def fetch(remote: Remote, folder: Path, say: Say = to_stderr) -> Path:
    """The file in this folder, downloaded from the first mirror that gives it with the right checksum."""
    part = folder / f"{remote.name}.part"  # goes on from here, now or another day
    faults: list[str] = []
    for url in remote.urls:
        say(f"fetching {remote.describe()} from {_host(url)}")
        try:
            _download(url, remote, part, say)
            return part.replace(folder / remote.name)
        except _Unfetched as error:
            faults.append(str(error))
            say(str(error))
        except OSError as error:
            raise DataError(
                f"{folder} cannot be written to ({error}); choose another folder for data",
                code="cannot-write",
                path=folder,
            ) from error
    raise DataError(
        f"{remote.name} could not be fetched: {', '.join(faults)}", code="download-failed", name=remote.name
    )


def _download(url: str, remote: Remote, part: Path, say: Say) -> None:
    """Completes the partial file; one that turns out to be of another file is dropped."""
    import pooch

    resumed = part.exists()
    while not _more(url, remote, part, say):
        say(f"the connection to {_host(url)} was cut; going on from {_size(part):,} bytes")
    found = pooch.file_hash(str(part), alg="md5")
    if remote.md5 in (None, found):
        return
    part.unlink()
    fault = f"{_host(url)} gives a file with md5 {found}, not {remote.md5}"
    if not resumed:
        raise _Unfetched(fault)
    say(f"{fault}; what was left of an earlier download may be at fault, starting again")
    _download(url, remote, part, say)


def _more(url: str, remote: Remote, part: Path, say: Say) -> bool:
    """One request; True when the file is complete, False when another request may bring more."""
    import requests

    before = _size(part)
    headers = {"Accept-Encoding": "identity"}  # a compressed answer could not be resumed
    if before:
        headers["Range"] = f"bytes={before}-"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            if answer.status_code != 416:  # else nothing lies beyond what is here
                answer.raise_for_status()
                _append(answer, remote, part, say)
        return True
    except requests.RequestException as error:
        if _size(part) > before:
            return False
        raise _Unfetched(f"{_host(url)} {_reason(error)}") from error


def _append(answer: Any, remote: Remote, part: Path, say: Say) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    size, told = remote.size or 0, 0
    with part.open("ab" if answer.status_code == 206 else "wb") as file:
        for chunk in answer.iter_content(CHUNK):
            file.write(chunk)
            done = LINES * file.tell() // size if size > LINE_SIZE else 0
            if told < done < LINES:
                say(f"{remote.name}: {done / LINES:.0%} of {size / 1e6:.1f} MB")
                told = done


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    return urlsplit(url).netloc


def _reason(error: Exception) -> str:
    """A network library's errors run over many lines; what kind it is says enough."""
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answers HTTP {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "does not answer in time"
    return "cannot be reached"


def unpack(archive: Path, folder: str, into: Path) -> Path:
    """Put the archive's `folder` into `into`, all of it or nothing, and nothing anywhere else."""
    final = into / folder
    if final.exists():
        raise DataError(
            f"{final} is there but is not complete; remove it and try again",
            code="incomplete-folder",
            path=final,
        )
    try:
        into.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unpacking-", dir=into, ignore_cleanup_errors=True) as work:
            _extract(archive, work)
            if not Path(work, folder).is_dir():
                raise DataError(
                    f"{archive} holds no folder {folder}; it is not the official file, fetch it again",
                    code="bad-archive",
                    path=archive,
                )
            return Path(work, folder).rename(final)
    except (
        OSError, EOFError, RuntimeError, ValueError, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError
    ) as error:  # fmt: skip
        raise DataError(
            f"{archive} cannot be unpacked into {into} ({one_line(str(error))}); fetch it again, or make room",
            code="bad-archive",
            path=archive,
        ) from error


def _extract(archive: Path, into: str) -> None:
    """Nothing outside, and nothing that is packed so tightly that it is meant to fill the disk."""
    with open_regular(archive) as file:
        allowed = UNPACKED * archive.stat().st_size + UNPACKED_SLACK
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as bundle:
                list(_within(allowed, ((entry, entry.file_size) for entry in bundle.infolist())))
                bundle.extractall(into)  # what a name has of roots and .. is left out
            return
        file.seek(0)
        safe: Any = (
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        )  # early releases of 3.10, 3.11
        with tarfile.open(fileobj=file) as bundle:
            bundle.extractall(into, _within(allowed, ((member, member.size) for member in bundle)), **safe)


def _within(allowed: int, entries: Iterable[tuple[Entry, int]]) -> Iterator[Entry]:
    """Entries of an archive, as long as their sizes stay below what is allowed."""
    for entry, size in entries:
        allowed -= size
        if allowed < 0:
            raise ValueError("it holds far more than its size allows")
        yield entry
