"""CIFAR-10 and CIFAR-100 in both official formats, read without executing anything that a pickle may ask for.

The Python format is pickled; the binary format is plain records of label bytes and 3072 pixel bytes. Both
hold the images in the same order. Whichever lies in the folder is read, the Python files where both do.
"""

from __future__ import annotations

import codecs
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protosteer.errors import DataError

PIXELS = 3 * 32 * 32

# All that an array needs to be rebuilt; any other name in a pickle is refused.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no CIFAR file needs; do not trust it"
            )
        return _ALLOWED[module, name]


@dataclass(frozen=True)
class _Format:
    """File names of one data set in one format, and the keys of its pickles."""

    title: str
    classes: int
    splits: dict[str, tuple[str, ...]]
    names: str
    archive: str
    label_key: str = ""  # empty: the binary format
    names_key: str = ""

    def files(self, folder: Path) -> list[Path]:
        return [folder / name for names in self.splits.values() for name in names] + [folder / self.names]


def _batches(suffix: str) -> dict[str, tuple[str, ...]]:
    numbered = tuple(f"data_batch_{i}{suffix}" for i in range(1, 6))
    return {"train": numbered, "test": (f"test_batch{suffix}",)}


_PYTHON_100 = _Format(
    "CIFAR-100", 100, {"train": ("train",), "test": ("test",)}, "meta",
    "cifar-100-python.tar.gz", "fine_labels", "fine_label_names",
)  # fmt: skip
_BINARY_100 = _Format(
    "CIFAR-100", 100, {"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt",
    "cifar-100-binary.tar.gz",
)  # fmt: skip
_PYTHON_10 = _Format(
    "CIFAR-10", 10, _batches(""), "batches.meta", "cifar-10-python.tar.gz", "labels", "label_names"
)
_BINARY_10 = _Format("CIFAR-10", 10, _batches(".bin"), "batches.meta.txt", "cifar-10-binary.tar.gz")
_FORMATS = {10: (_PYTHON_10, _BINARY_10), 100: (_PYTHON_100, _BINARY_100)}


def cifar_files(folder: Path, classes: int) -> list[Path] | None:
    """All files of CIFAR-10 or CIFAR-100 in the format that is present in full, or None."""
    for layout in _FORMATS[classes]:
        files = layout.files(folder)
        if all(file.is_file() for file in files):
            return files
    return None


def read_cifar100(folder: str | Path, split: str) -> tuple[Tensor, Tensor, list[str]]:
    """Pixels uint8 [N, 3, 32, 32] in file order, fine labels [N], and the names of the 100 classes.

    folder: the unpacked `cifar-100-python` or `cifar-100-binary`. split: "train" or "test".
    """
    return _read(Path(folder), split, 100)


def read_cifar10(folder: str | Path, split: str) -> tuple[Tensor, Tensor, list[str]]:
    """Pixels uint8 [N, 3, 32, 32], labels [N] and the 10 class names; the batches follow their numbers.

    folder: the unpacked `cifar-10-batches-py` or `cifar-10-batches-bin`. split: "train" or "test".
    """
    return _read(Path(folder), split, 10)


def _read(folder: Path, split: str, classes: int) -> tuple[Tensor, Tensor, list[str]]:
    python, binary = _FORMATS[classes]
    layout = binary if (folder / binary.splits[split][0]).is_file() else python
    if (folder / python.splits[split][0]).is_file():
        layout = python
    paths = [folder / name for name in layout.splits[split]]
    read = _read_pickle if layout.label_key else _read_records
    parts = [read(path, layout) for path in paths]
    pixels = np.concatenate([rows for rows, _ in parts]) if len(parts) > 1 else parts[0][0]
    labels = np.concatenate([values for _, values in parts])
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(
            f"{paths[0].parent}: {layout.title} labels run to {labels.max()}; fetch the files again"
        )
    images = torch.from_numpy(pixels.reshape(-1, 3, 32, 32))
    return images, torch.from_numpy(labels.astype(np.int64)), _names(folder / layout.names, layout)


def _read_pickle(path: Path, layout: _Format) -> tuple[np.ndarray, np.ndarray]:
    table = _unpickle(path, layout)
    try:
        rows, labels = np.array(table["data"], dtype=np.uint8), np.array(table[layout.label_key])
    except KeyError as error:
        raise DataError(f"{path} is not a {layout.title} file: it has no {error}") from error
    if rows.shape != (len(labels), PIXELS):
        raise DataError(
            f"{path}: {len(labels)} labels but pixels of shape {list(rows.shape)}; fetch it again"
        )
    return rows, labels


def _read_records(path: Path, layout: _Format) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-100 puts a coarse label before the fine one."""
    heading = 1 if layout.classes == 10 else 2
    content = np.frombuffer(_bytes(path, layout), dtype=np.uint8)
    if not len(content) or len(content) % (heading + PIXELS):
        raise DataError(
            f"{path} has {len(content)} bytes, which is no multiple of {heading + PIXELS}; fetch it again"
        )
    records = content.reshape(-1, heading + PIXELS)
    return records[:, heading:].copy(), records[:, heading - 1].copy()


def _names(path: Path, layout: _Format) -> list[str]:
    if layout.names_key:
        table = _unpickle(path, layout)
        names = [str(name) for name in table.get(layout.names_key, [])]
    else:
        text = _bytes(path, layout).decode("latin1")
        names = [line.strip() for line in text.splitlines() if line.strip()]
    if len(names) != layout.classes:
        raise DataError(f"{path} names {len(names)} classes, not {layout.classes}; fetch it again")
    return names


def _unpickle(path: Path, layout: _Format) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return dict(_ArraysOnly(file, encoding="latin1").load())
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; unpack {layout.archive} there") from error
    except DataError:
        raise
    except Exception as error:  # damaged pickles make the unpickler raise nearly anything
        raise DataError(f"{path} is not a {layout.title} file: {error}") from error


def _bytes(path: Path, layout: _Format) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; unpack {layout.archive} there") from error
