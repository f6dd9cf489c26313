"""The idx format of MNIST and its relatives: a magic number, the sizes, then the bytes; plain or gzipped."""

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
import torch.nn.functional as F
from torch import Tensor

from protosteer.errors import DataError
from protosteer.util.files import read_regular

MOST_UNZIPPED = 2**29  # bytes; notMNIST, the largest, has 415 million
PARTS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def idx_files(folder: Path, prefixes: tuple[str, ...] = ("train", "t10k")) -> list[Path] | None:
    """Images and labels of each prefix, plain or gzipped, or None where one of them is absent."""
    found = []
    for name in (f"{prefix}-{part}" for prefix in prefixes for part in PARTS):
        found += [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()][:1]
    return found if len(found) == len(prefixes) * len(PARTS) else None


def content(path: Path) -> bytes:
    """What the file holds, unzipped where it is gzipped."""
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
            unpacked = unzipped.read(MOST_UNZIPPED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged or cut short ({error}); fetch it again", code="damaged-file", path=path
        ) from error
    if len(unpacked) > MOST_UNZIPPED:
        raise DataError(
            f"{path} holds more than {MOST_UNZIPPED:,} bytes, which no such data set has; fetch it again",
            code="damaged-file",
            path=path,
        )
    return unpacked


def read_idx(path: Path, dimensions: int) -> Tensor:
    """uint8 with the sizes that the file states; it must have so many dimensions."""
    data = content(path)
    magic, start = bytes([0, 0, 8, dimensions]), 4 + 4 * dimensions  # 8: unsigned bytes
    if data[:4] != magic or len(data) < start:
        raise DataError(
            f"{path} begins with {data[:4].hex() or 'nothing'}, not {magic.hex()} and {dimensions} sizes: "
            "it is no idx file of bytes, or cut short; fetch it again",
            code="damaged-file",
            path=path,
        )
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise DataError(
            f"{path} holds {len(data) - start} bytes for sizes {list(shape)}, not {math.prod(shape)}; "
            "it is damaged or cut short, fetch it again",
            code="damaged-file",
            path=path,
        )
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy())


def read_images(images: Path, labels: Path) -> tuple[Tensor, Tensor]:
    """Pixels uint8 [N, 3, h + 4, w + 4], see `as_small_images`, and labels [N]."""
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise DataError(
            f"{images} has {len(pixels)} images but {labels} {len(numbers)} labels; fetch them again",
            code="label-count",
            path=images,
        )
    return as_small_images(pixels), numbers.long()


def read_halves(found: Sequence[Path]) -> list[tuple[Tensor, Tensor]]:
    """Pixels and labels of each prefix, from what `idx_files` found."""
    return [read_images(*pair) for pair in zip(found[::2], found[1::2], strict=True)]


def as_small_images(grey: Tensor) -> Tensor:
    """[N, 28, 28] -> [N, 3, 32, 32]: a black edge of 2 makes them as large as CIFAR's images.

    The three channels are one and the same memory.
    """
    return F.pad(grey, (2, 2, 2, 2)).unsqueeze(1).expand(-1, 3, -1, -1)
