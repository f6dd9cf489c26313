"""Find and open every data set and benchmark by name.

A data set is looked for in DATA/NAME, in DATA/<its official folder> and in DATA itself. Files with an official
checksum must match it. `Dataset.checksums` has the checksums of everything that was read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from protosteer.data.datasets import (
    cifar,
    cub,
    digits,
    image_folders,
    imagenet_subset,
    mnist,
    notmnist,
    sklearn_photos,
    svhn,
)
from protosteer.data.datasets.base import Benchmark, DatasetInfo, Reading, damaged_file
from protosteer.data.datasets.prepare import get_dataset
from protosteer.data.labelled import Dataset, join
from protosteer.errors import DataError
from protosteer.util.files import cache_dir
from protosteer.util.text import suggestion

DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        cifar.CIFAR100, cifar.CIFAR10, mnist.MNIST, mnist.FASHION_MNIST, svhn.SVHN, notmnist.NOTMNIST,
        *image_folders.INFOS, cub.CUB200, imagenet_subset.IMAGENET_SUBSET, digits.DIGITS, sklearn_photos.DETAILS,
    )
}  # fmt: skip

# In the order of the paper's authors. All have 32 x 32 pixels, so that a task may mix them.
FIVE = Benchmark(
    "five-datasets", "5-datasets", tasks=5, crop=1.0,
    datasets=("cifar10", "notmnist", "mnist", "svhn", "fashion-mnist"),
)  # fmt: skip

# Digits and letters: no image of them is in the training data of the shipped backbones.
GLYPHS = Benchmark("glyphs", "Digits and letters", tasks=5, crop=1.0, datasets=("mnist", "notmnist"))

# The ten digits in two domains.
DIGIT_DOMAINS = Benchmark("digit-domains", "Digits", tasks=2, crop=1.0, datasets=("mnist", "svhn"), domains=True)

BENCHMARKS: dict[str, Benchmark] = {
    row.name: row
    for row in (
        cifar.BENCHMARK, FIVE, GLYPHS, DIGIT_DOMAINS, imagenet_subset.BENCHMARK, *image_folders.BENCHMARKS, cub.BENCHMARK,
        digits.BENCHMARK, sklearn_photos.BENCHMARK,
    )
}  # fmt: skip


@dataclass(frozen=True)
class DatasetStatus:
    """A data set, and the folder of its files if they are on this disk."""

    info: DatasetInfo
    path: Path | None


def data_root(data_dir: Path | None = None) -> Path:
    """Return the folder for data: the one given, else PROTOSTEER_DATA, else protosteer's cache."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    variable = os.environ.get("PROTOSTEER_DATA")
    return Path(variable).expanduser() if variable else cache_dir() / "data"


def find_dataset(name: str) -> DatasetInfo:
    """Return the description of a data set; raise `DataError` with code `unknown-dataset`."""
    if name in DATASETS:
        return DATASETS[name]
    hint = suggestion(name.lower().replace("_", "-"), DATASETS)
    raise DataError(f"no data set is called '{name}'; {hint}", code="unknown-dataset", name=name)


def list_datasets(data_dir: Path | None = None) -> list[DatasetStatus]:
    """List every data set with the folder where it was found; checksums are not verified."""
    root = data_root(data_dir)
    return [DatasetStatus(info, info.locate(root)) for info in DATASETS.values()]


def open_dataset(name: str, data_dir: Path | None, reading: Reading) -> Dataset:
    """Find a data set, download it if missing, verify and read it."""
    info = find_dataset(name)
    folder, checksums = get_dataset(info, data_root(data_dir), reading.say)
    dataset = info.load(folder, reading)
    if len(dataset.classes) != info.classes:
        raise damaged_file(folder, f"holds {len(dataset.classes)} classes, but {info.title} {info.classes}")
    return replace(dataset, checksums={**dataset.checksums, **checksums})


def open_benchmark(benchmark: Benchmark, data_dir: Path | None, reading: Reading) -> Dataset:
    """Open a benchmark's data sets, joined into one; report all missing ones in one `DataError`."""
    parts: dict[str, Dataset] = {}
    errors: list[DataError] = []
    for name in benchmark.datasets:
        try:
            parts[name] = open_dataset(name, data_dir, reading)
        except DataError as error:
            errors.append(error)
    if errors:
        raise DataError("; and ".join(map(str, errors)), code="missing-dataset") from errors[0]
    return join(benchmark.name, parts) if len(parts) > 1 else next(iter(parts.values()))
