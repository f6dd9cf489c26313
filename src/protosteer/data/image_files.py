"""Find, open, read and hash image files."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from PIL import Image, UnidentifiedImageError

from protosteer.data.decode_budget import formats
from protosteer.data.hf_arrow import is_row, row_bytes, row_version
from protosteer.errors import DataError
from protosteer.util.files import open_regular, read_regular
from protosteer.util.text import one_line

SUFFIXES = frozenset((
    ".apng", ".avif", ".bmp", ".gif", ".heic", ".heif", ".hif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm",
    ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp",
))  # fmt: skip
HEIC_SUFFIXES = frozenset((".heic", ".heif", ".hif"))  # photographs of phones; read if pillow-heif is installed
VIDEO_SUFFIXES = frozenset((".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".webm", ".wmv"))
_SYSTEM_FILES = frozenset(("desktop.ini", "thumbs.db"))  # created by Windows

# Reasons for which files are skipped, by the code of the error that says so; for lines such as "skipped 2 videos".
SKIP_REASONS = {
    "unreadable-image": "damaged or not an image",
    "image-too-large": "too many pixels",
    "heic-not-supported": "HEIC, which needs: pip install 'protosteer[heic]'",
}

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Apply `work` to items in threads; yield results in order. Pillow and hashlib release the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(work, items)


@contextmanager
def opened(path: Path, content: bytes | None = None) -> Iterator[Image.Image]:
    """Open an image file, or its `content`; any error inside the block becomes a `DataError`."""
    try:
        with (
            _open(path) if content is None else io.BytesIO(content) as file,
            Image.open(file, formats=formats()) as image,
        ):
            yield image
    except Image.DecompressionBombError as error:
        message = f"{path} has more pixels than are read safely; make the image smaller"
        raise DataError(message, code="image-too-large", path=path) from error
    except UnidentifiedImageError as error:
        if path.suffix.lower() in HEIC_SUFFIXES and "HEIF" not in formats():
            message = f"{path} is a HEIC photo; to read it: pip install 'protosteer[heic]', or save it as JPEG"
            raise DataError(message, code="heic-not-supported", path=path) from error
        message = f"{path} cannot be read as an image; replace or remove it (unknown format)"
        raise DataError(message, code="unreadable-image", path=path) from error
    except Exception as error:  # a damaged file makes decoders raise nearly anything
        message = f"{path} cannot be read as an image; replace or remove it ({one_line(str(error))})"
        raise DataError(message, code="unreadable-image", path=path) from error


def _open(path: Path) -> BinaryIO:
    return io.BytesIO(row_bytes(path)) if is_row(path) else open_regular(path)


def image_bytes(path: Path) -> bytes:
    """Read an image file's bytes without decoding them; raise `OSError` if there is none."""
    return row_bytes(path) if is_row(path) else read_regular(path)


def image_version(path: Path) -> tuple[int, int]:
    """Return size in bytes and modification time in nanoseconds; raise `OSError` if there is no file."""
    if is_row(path):
        return row_version(path)
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def image_exists(path: Path) -> bool:
    """Return True if the file exists; for a row of an Arrow file, if the Arrow file exists."""
    return os.path.isfile(path.parent if is_row(path) else path)


def image_files(path: Path) -> list[Path]:
    """Return the file itself, or every image below a folder."""
    if image_exists(path):
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; check the path", code="missing-file", path=path)
    paths = images_below(path)
    if not paths:
        message = f"{path} holds no image files; these suffixes are read: {' '.join(sorted(SUFFIXES))}"
        raise DataError(message, code="no-images", path=path)
    return paths


def images_below(folder: Path) -> list[Path]:
    """List image files in a folder and its sub-folders, sorted, without hidden ones."""
    return sorted(
        path
        for path in folder.rglob("*")
        if is_image(path) and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def is_image(path: Path) -> bool:
    """Return True if `path` is a visible file with an image suffix."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def skipped_files(folder: Path) -> dict[str, list[Path]]:
    """Return the visible files below a folder that are no images, by kind: "video" or "not an image"."""
    paths_by_kind: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if is_image(path) or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.is_file() and path.name.lower() not in _SYSTEM_FILES:
            kind = "video" if path.suffix.lower() in VIDEO_SUFFIXES else "not an image"
            paths_by_kind.setdefault(kind, []).append(path)
    return paths_by_kind


def text_lines(path: Path) -> list[tuple[int, str]]:
    """Read numbered lines of a text file, without blank ones and those that begin with #."""
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as UTF-8 text ({error}); check the file", code="not-utf8", path=path
        ) from error
    stripped = ((number, line.strip()) for number, line in enumerate(lines, 1))
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def tree_checksum(paths: Iterable[Path], base: Path) -> str:
    """Hash relative names and contents of files, in sorted order, with sha256."""

    def line(path: Path) -> str:
        name = os.path.relpath(path, base).replace(os.sep, "/")
        return f"{name}\0{hashlib.sha256(read_regular(path)).hexdigest()}\n"

    try:
        lines = sorted(in_threads(line, paths))
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename} is missing; unpack the images again", code="missing-file", path=error.filename
        ) from error
    return f"sha256:{hashlib.sha256(''.join(lines).encode('utf-8', 'surrogateescape')).hexdigest()}"
