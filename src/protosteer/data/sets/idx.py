"""The idx format of MNIST and its relatives: a magic number, the sizes, then the bytes; plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.data.datasets import Dataset
from protosteer.data.sets.base import arrays, gone
from protosteer.errors import DataError

UNSIGNED_BYTES = 0x08
PARTS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def idx_files(folder: Path, prefixes: tuple[str, ...] = ("train", "t10k")) -> list[Path] | None:
    """Images and labels of each prefix, plain or gzipped, or None where one of them is absent."""
    found = [_either(folder / f"{prefix}-{part}") for prefix in prefixes for part in PARTS]
    return None if None in found else [path for path in found if path is not None]


def _either(path: Path) -> Path | None:
    zipped = path.with_name(f"{path.name}.gz")
    return next((candidate for candidate in (path, zipped) if candidate.is_file()), None)


def content(path: Path) -> bytes:
    """What the file holds, unzipped where it is gzipped."""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or cut short ({error}); fetch it again") from error


def read_idx(path: Path, dimensions: int) -> Tensor:
    """uint8 with the sizes that the file states; it must have so many dimensions."""
    data = content(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != UNSIGNED_BYTES or data[3] != dimensions:
        raise DataError(
            f"{path} begins with {data[:4].hex() or 'nothing'}, not {bytes([0, 0, 8, dimensions]).hex()}: "
            f"it is no idx file of bytes with {dimensions} dimensions; fetch it again"
        )
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise DataError(f"{path} is cut short: {len(data)} bytes do not hold its heading; fetch it again")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise DataError(
            f"{path} holds {len(data) - start} bytes for sizes {list(shape)}, not {math.prod(shape)}; "
            "it is damaged or cut short, fetch it again"
        )
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy())


def read_images(images: Path, labels: Path) -> tuple[Tensor, Tensor]:
    """Pixels uint8 [N, 3, h + 4, w + 4], see `as_small_images`, and labels [N]."""
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise DataError(
            f"{images} has {len(pixels)} images but {labels} {len(numbers)} labels; fetch them again"
        )
    return as_small_images(pixels), numbers.long()


def as_small_images(grey: Tensor) -> Tensor:
    """[N, 28, 28] -> [N, 3, 32, 32]: a black edge of 2 makes them as large as CIFAR's images.

    The three channels are one and the same memory.
    """
    return F.pad(grey, (2, 2, 2, 2)).unsqueeze(1).expand(-1, 3, -1, -1)


def load_idx(name: str, classes: Sequence[str], folder: Path) -> Dataset:
    train_images, train_labels, test_images, test_labels = idx_files(folder) or gone(folder)
    train, test = read_images(train_images, train_labels), read_images(test_images, test_labels)
    return arrays(name, classes, train, test)
