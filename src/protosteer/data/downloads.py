"""Downloads that can be cut, resumed and trusted, and archives unpacked so that nothing is ever half there.

pooch checks what was fetched and puts it into place; how it is fetched is decided here, because pooch itself
can neither go on with a partial file nor try the next mirror.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from protosteer.errors import DataError

TIMEOUT = (10, 60)  # seconds to connect, and without a byte
CHUNK = 1 << 16  # at most so much is lost when a connection is cut
LINE_SHARE = 0.1  # a plain line after every tenth of a file
LINE_SIZE = 20_000_000  # but none for files that are smaller

Say = Callable[[str], None]


@dataclass(frozen=True)
class Remote:
    """A file on the network; `folder` is what an archive holds and all that is unpacked of it."""

    name: str
    size: int | None  # bytes, where it is known
    urls: tuple[str, ...]
    md5: str | None = None
    folder: str | None = None

    def describe(self) -> str:
        return f"{self.name} ({self.size:,} bytes)" if self.size else self.name


def fetch(remote: Remote, folder: Path, on_message: Say | None = None) -> Path:
    """The file in this folder, downloaded from the first mirror that gives it with the right checksum.

    on_message: takes plain lines; without it progress is shown on standard error.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        faults: list[str] = []
        for url in remote.urls:
            with _progress(remote, on_message) as progress:
                progress.say(f"fetching {remote.describe()} from {_host(url)}")
                try:
                    return _from_mirror(url, remote, folder, progress)
                except _Unfetched as error:
                    faults.append(str(error))
                    progress.say(str(error))
    except OSError as error:
        raise DataError(f"{folder} cannot be written to ({error}); choose another folder for data") from error
    with suppress(OSError):
        folder.rmdir()  # made for this file alone, and still empty
    raise DataError(f"{remote.name} could not be fetched: {', '.join(faults)}")


def _from_mirror(url: str, remote: Remote, folder: Path, progress: _Progress) -> Path:
    downloader = _Resuming(folder / f"{remote.name}.part", progress)
    resumed = downloader.part.exists()
    try:
        return _retrieve(url, remote, folder, downloader)
    except _WrongContent as error:
        if not resumed:
            raise
        progress.say(f"{error}; what was left of an earlier download may be at fault, starting again")
        return _retrieve(url, remote, folder, downloader)


def _retrieve(url: str, remote: Remote, folder: Path, downloader: _Resuming) -> Path:
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # what it says is said here in other words
    try:
        known = f"md5:{remote.md5}" if remote.md5 else None
        return Path(pooch.retrieve(url, known, fname=remote.name, path=folder, downloader=downloader))
    except ValueError as error:
        if "hash" not in str(error):
            raise
        found = str(error).rpartition("but got ")[2].split(".")[0]
        raise _WrongContent(f"{_host(url)} gives a file with md5 {found}, not {remote.md5}") from error
    finally:
        logger.setLevel(level)


def _host(url: str) -> str:
    return urlsplit(url).netloc


class _Unfetched(Exception):
    """One mirror failed; the next may not."""


class _WrongContent(_Unfetched):
    """All of a file came, but it is another one."""


class _Resuming:
    """A pooch downloader that keeps what it has in a .part file and goes on from there, now or another day."""

    def __init__(self, part: Path, progress: _Progress):
        self.part = part
        self.progress = progress

    def __call__(self, url: str, output_file: Any, pooch: Any = None, check_only: bool = False) -> None:
        while not self._more(url):
            self.progress.say(f"the connection to {_host(url)} was cut; going on from {self._size():,} bytes")
        self.part.replace(output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _more(self, url: str) -> bool:
        """One request; True when the file is complete, False when another request may bring more."""
        import requests

        before = self._size()
        headers = {"Accept-Encoding": "identity"}  # a compressed answer could not be resumed
        if before:
            headers["Range"] = f"bytes={before}-"
        try:
            with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
                return self._take(answer, before)
        except (requests.RequestException, OSError) as error:
            if self._size() > before:
                return False
            raise _Unfetched(f"{_host(url)} {_reason(error)}") from error

    def _take(self, answer: Any, before: int) -> bool:
        if answer.status_code == 416:  # nothing lies beyond what is here: all of it, or something else
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            if total == str(before):
                return True
            self.part.unlink()
            return False
        answer.raise_for_status()
        resumed = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(
            f"bytes {before}-"
        )
        start = before if resumed else 0
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else None
        with self.part.open("ab" if resumed else "wb") as file:
            done = start
            for chunk in answer.iter_content(CHUNK):
                file.write(chunk)
                done += len(chunk)
                self.progress.update(done, total)
        if total is not None and done < total:  # urllib3 before version 2 does not notice
            raise ConnectionError("the connection was closed early")
        return True


def _reason(error: Exception) -> str:
    """A network library's errors run over many lines; what kind it is says enough."""
    import requests

    if getattr(error, "response", None) is not None:
        return f"answers HTTP {error.response.status_code}"  # type: ignore[attr-defined]
    if isinstance(error, requests.Timeout):
        return "does not answer in time"
    if isinstance(error, (requests.ConnectionError, ConnectionError)):
        return "cannot be reached"
    return getattr(error, "strerror", None) or f"fails with {type(error).__name__}"


class _Progress(Protocol):
    def say(self, line: str) -> None: ...
    def update(self, done: int, total: int | None) -> None: ...


@contextmanager
def _progress(remote: Remote, on_message: Say | None) -> Iterator[_Progress]:
    """A bar on a terminal, plain lines anywhere else and wherever somebody asks for them."""
    if on_message is None and sys.stderr.isatty():
        with _Bar(remote) as bar:
            yield bar
    else:
        yield _Lines(remote, on_message or to_stderr)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Lines:
    def __init__(self, remote: Remote, say: Say):
        self.remote = remote
        self.say = say
        self.next_share = LINE_SHARE

    def update(self, done: int, total: int | None) -> None:
        size = total or self.remote.size or 0
        if size >= LINE_SIZE and self.next_share <= done / size < 1:
            self.say(f"{self.remote.name}: {done / size:.0%} of {size / 1e6:.1f} MB")
            self.next_share = done / size + LINE_SHARE


class _Bar:
    def __init__(self, remote: Remote):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            DownloadColumn(),
            Speed(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=console, transient=True)
        self.row = self.bar.add_task(remote.name, total=remote.size)

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def update(self, done: int, total: int | None) -> None:
        self.bar.update(self.row, completed=done, total=total)


# Archives


def unpack(archive: Path, folder: str, into: Path) -> Path:
    """Put the archive's `folder` into `into`, all of it or nothing; only plain files and folders are taken."""
    final = into / folder
    if final.exists():
        raise DataError(f"{final} is there but is not complete; remove it and try again")
    try:
        into.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=into))
    except OSError as error:
        raise DataError(f"{into} cannot be written to ({error}); choose another folder for data") from error
    try:
        for name, content in _members(archive):
            parts = _safe(name, archive)
            if parts[: len(PurePosixPath(folder).parts)] != PurePosixPath(folder).parts:
                continue
            target = work.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with content as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, CHUNK)
        if not (work / folder).is_dir():
            raise DataError(
                f"{archive} holds no folder {folder}; it is not the official file, fetch it again"
            )
        return (work / folder).rename(final)
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked into {into} ({error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of the files in a zip or tar archive; folders follow from the names."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for entry in bundle.infolist():
                if not entry.is_dir():
                    yield entry.filename, bundle.open(entry)
        return
    with tarfile.open(archive) as bundle:
        for member in bundle:
            if member.isdir():
                continue
            content = bundle.extractfile(member) if member.isfile() else None
            if content is None:
                raise DataError(f"{archive}: {member.name} is a link or a device; do not trust this archive")
            yield member.name, content


def _safe(name: str, archive: Path) -> tuple[str, ...]:
    """The parts of a name in an archive, which must not lead out of the folder it is unpacked into."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts or ":" in path.parts[0]:
        raise DataError(f"{archive}: {name!r} would lie outside the folder; do not trust this archive")
    return path.parts
