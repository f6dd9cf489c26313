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

from protosteer.data.datasets import Dataset
from protosteer.data.sets.base import Benchmark, DatasetInfo, all_of, arrays, remote
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

    def files(self) -> list[str]:
        return [name for names in self.splits.values() for name in names] + [self.names]


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
        if files := all_of(folder, *layout.files()):
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


# The records


def _load(folder: Path, classes: int) -> Dataset:
    pixels, labels, names = _read(folder, "train", classes)
    return arrays(f"cifar{classes}", names, (pixels, labels), _read(folder, "test", classes)[:2])


PAGES = ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz")

CIFAR100 = DatasetInfo(
    name="cifar100",
    title="CIFAR-100",
    classes=100,
    licence="none stated",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    find=lambda folder: cifar_files(folder, 100),
    load=lambda folder, reading: _load(folder, 100),
    files=(
        remote(
            PAGES, "cifar-100-python.tar.gz", 169_001_437,
            "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python",
        ),
    ),
    accepted=(
        remote(
            PAGES, "cifar-100-binary.tar.gz", 168_513_733,
            "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary",
        ),
    ),
    folders=("cifar-100-python", "cifar-100-binary"),
    md5={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
        "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
        "test.bin": "4499cfba6c016c1be1438163640a0898",
    },
)  # fmt: skip

CIFAR10 = DatasetInfo(
    name="cifar10",
    title="CIFAR-10",
    classes=10,
    licence="none stated",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    find=lambda folder: cifar_files(folder, 10),
    load=lambda folder, reading: _load(folder, 10),
    files=(
        remote(
            PAGES, "cifar-10-python.tar.gz", 170_498_071,
            "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py",
        ),
    ),
    accepted=(
        remote(
            PAGES, "cifar-10-binary.tar.gz", 170_052_171,
            "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin",
        ),
    ),
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
)  # fmt: skip

BENCHMARK = Benchmark("split-cifar100", "Split CIFAR-100", tasks=10, crop=1.0, datasets=("cifar100",))
