"""Read the idx format of MNIST: a magic number, the sizes, then the bytes; plain or gzipped."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from protosteer.data.datasets.base import damaged_file
from protosteer.errors import DataError
from protosteer.util.files import read_regular

MAX_UNZIPPED = 2**29  # bytes; notMNIST, the largest, has 415 million
PARTS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def idx_files(folder: Path, prefixes: tuple[str, ...] = ("train", "t10k")) -> list[Path] | None:
    """Return the files of images and labels of each prefix, plain or gzipped, or None if one is missing."""
    paths: list[Path] = []
    for name in (f"{prefix}-{part}" for prefix in prefixes for part in PARTS):
        paths += [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()][:1]
    return paths if len(paths) == len(prefixes) * len(PARTS) else None


def content(path: Path) -> bytes:
    """Read a file, and unzip it if it is gzipped; raise `DataError` if it is damaged."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check the file", code="unreadable-file", path=path
        ) from error
    if path.suffix != ".gz":
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as unzipped:
            unpacked = unzipped.read(MAX_UNZIPPED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged_file(path, f"is damaged or cut short ({error})") from error
    if len(unpacked) > MAX_UNZIPPED:
        raise damaged_file(path, f"holds more than {MAX_UNZIPPED:,} bytes, which no such data set has")
    return unpacked


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read a file of `dimensions` sizes to uint8 of that shape; raise `DataError` if it is damaged."""
    data = content(path)
    magic, start = bytes([0, 0, 8, dimensions]), 4 + 4 * dimensions  # 8: unsigned bytes
    if data[:4] != magic or len(data) < start:
        start_bytes = data[:4].hex() or "nothing"
        raise damaged_file(path, f"begins with {start_bytes}, not {magic.hex()} and {dimensions} sizes")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if len(data) - start != math.prod(shape):
        size = len(data) - start
        raise damaged_file(path, f"holds {size} bytes for sizes {list(shape)}, not {math.prod(shape)}")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy())


def read_images(images: Path, labels: Path) -> tuple[Tensor, Tensor]:
    """Read pixels uint8 [N, 3, h + 4, w + 4], see `as_small_images`, and labels [N]."""
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        message = f"{images} has {len(pixels)} images but {labels} {len(numbers)} labels; fetch them again"
        raise DataError(message, code="label-count", path=images)
    return as_small_images(pixels), numbers.long()


def read_halves(files: Sequence[Path]) -> list[tuple[Tensor, Tensor]]:
    """Read pixels and labels of each prefix from the files that `idx_files` returned."""
    return [read_images(*pair) for pair in zip(files[::2], files[1::2], strict=True)]


def as_small_images(grey: Tensor) -> Tensor:
    """Pad [N, 28, 28] with black to [N, 3, 32, 32], the size of CIFAR's images; the channels share memory."""
    return pad(grey, (2, 2, 2, 2)).unsqueeze(1).expand(-1, 3, -1, -1)
