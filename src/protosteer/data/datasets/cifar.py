"""Read CIFAR-10 and CIFAR-100 in both official formats, without executing what a pickle asks for.

The Python format is pickled; the binary format is plain records of label bytes and 3072 pixel bytes. Both hold
the images in the same order. If a folder has both, the Python files are read.

`prepare.verify` compares checksums before a data set is opened by name. `read_cifar` itself also reads files of
the same form with other content, and is safe whatever the bytes are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protosteer.data.datasets.base import Benchmark, Contents, DatasetInfo, all_of, arrays
from protosteer.data.datasets.safe_pickle import read_pickled
from protosteer.data.downloads import Remote
from protosteer.errors import DataError
from protosteer.util.files import open_regular, read_regular

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Format:
    """File names of one data set in one official format."""

    archive: str
    splits: dict[str, tuple[str, ...]]
    names: str
    heading: int = 0  # label bytes of a record, the last of which counts; 0 for pickles

    def files(self) -> list[str]:
        return [*self.splits["train"], *self.splits["test"], self.names]

    @contextmanager
    def checked(self, path: Path) -> Iterator[None]:
        """Turn any exception of the block into a `DataError` about the file."""
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(
                f"{path} is missing; unpack {self.archive} there", code="missing-file", path=path
            ) from error
        except Exception as error:  # damaged pickles make the unpickler raise nearly anything
            message = f"{path} is no file of {self.archive} ({error}); unpack it again"
            raise DataError(message, code="damaged-file", path=path) from error


def _batches(suffix: str) -> dict[str, tuple[str, ...]]:
    numbered = tuple(f"data_batch_{i}{suffix}" for i in range(1, 6))
    return {"train": numbered, "test": (f"test_batch{suffix}",)}


_FORMATS = {
    10: (
        _Format("cifar-10-python.tar.gz", _batches(""), "batches.meta"),
        _Format("cifar-10-binary.tar.gz", _batches(".bin"), "batches.meta.txt", 1),
    ),
    100: (
        _Format("cifar-100-python.tar.gz", {"train": ("train",), "test": ("test",)}, "meta"),
        _Format(
            "cifar-100-binary.tar.gz", {"train": ("train.bin",), "test": ("test.bin",)},
            "fine_label_names.txt", 2,
        ),
    ),
}  # fmt: skip
_KEYS = {10: ("labels", "label_names"), 100: ("fine_labels", "fine_label_names")}


def cifar_files(folder: Path, classes: int) -> list[Path] | None:
    """Return all files of CIFAR-10 or CIFAR-100 in a format that is complete, or None."""
    layouts = (all_of(folder, *layout.files()) for layout in _FORMATS[classes])
    return next((files for files in layouts if files), None)


def read_cifar100(folder: str | Path, split: str) -> tuple[Tensor, Tensor, list[str]]:
    """Read the unpacked `cifar-100-python` or `cifar-100-binary` as `read_cifar` does, with the fine labels."""
    return read_cifar(Path(folder), split, 100)


def read_cifar(folder: Path, split: str, classes: int) -> tuple[Tensor, Tensor, list[str]]:
    """Read "train" or "test" of CIFAR-10 or -100: pixels uint8 [N, 3, 32, 32] in file order, labels int64 [N], names."""
    formats = _FORMATS[classes]
    layout = next((f for f in formats if (folder / f.splits[split][0]).is_file()), formats[0])
    labels_key, names_key = _KEYS[classes]
    parts = [_images(folder / name, layout, labels_key) for name in layout.splits[split]]
    pixels, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    path = folder / layout.names
    with layout.checked(path):
        names = read_regular(path).decode("latin1").splitlines() if layout.heading else _unpickled(path)[names_key]
        if type(names) is not list or not all(type(name) is str for name in names):
            raise ValueError(f"{names_key} is no list of names")
        return pixels, labels, [name.strip() for name in names if name.strip()]


def _images(path: Path, layout: _Format, labels_key: str) -> tuple[np.ndarray, np.ndarray]:
    pixels: Any
    labels: Any
    with layout.checked(path):
        if layout.heading:
            records = np.frombuffer(read_regular(path), np.uint8).reshape(-1, layout.heading + PIXELS)
            pixels, labels = records[:, layout.heading :], records[:, layout.heading - 1]
        else:
            table = _unpickled(path)
            pixels, labels = table["data"], table[labels_key]
        # Checked before numpy converts them: nested lists could become arrays far larger than the file.
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
            raise ValueError("data is no array of bytes")
        if not isinstance(labels, np.ndarray) and not all(type(label) is int for label in labels):
            raise ValueError(f"{labels_key} is no list of numbers")
        return pixels.reshape(len(labels), 3, 32, 32), np.array(labels, np.int64)


def _unpickled(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return dict(read_pickled(file))


def _read(files: Sequence[Path], classes: int) -> Contents:
    folder = files[0].parent
    pixels, labels, names = read_cifar(folder, "train", classes)
    return arrays(names, (pixels, labels), read_cifar(folder, "test", classes)[:2])


PAGES = ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz")


def _info(classes: int, archives: Sequence[tuple[int, str, str]], md5: dict[str, str]) -> DatasetInfo:
    """Describe CIFAR-10 or CIFAR-100; `archives` has size, md5 and folder of each format."""
    python, binary = (
        Remote(layout.archive, size, PAGES, checksum, folder)
        for layout, (size, checksum, folder) in zip(_FORMATS[classes], archives, strict=True)
    )
    return DatasetInfo(
        name=f"cifar{classes}",
        title=f"CIFAR-{classes}",
        classes=classes,
        licence="none stated",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        find=lambda folder: cifar_files(folder, classes),
        read=lambda files, reading: _read(files, classes),
        files=(python,),
        accepted=(binary,),
        md5=md5,
    )


CIFAR100 = _info(
    100,
    [
        (169_001_437, "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"),
        (168_513_733, "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary"),
    ],
    {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
        "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
        "test.bin": "4499cfba6c016c1be1438163640a0898",
    },
)
CIFAR10 = _info(
    10,
    [
        (170_498_071, "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"),
        (170_052_171, "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin"),
    ],
    {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
)

BENCHMARK = Benchmark("split-cifar100", "Split CIFAR-100", tasks=10, crop=1.0, datasets=("cifar100",))
