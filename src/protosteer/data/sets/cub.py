"""CUB-200-2011: 200 kinds of birds, with four tables that say which image is what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protosteer.data.datasets import Dataset
from protosteer.data.folders import Files
from protosteer.data.sets.base import Benchmark, DatasetInfo, Reading, all_of, lazy, remote
from protosteer.errors import DataError

TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")


def _find(folder: Path) -> Sequence[Path] | None:
    tables = all_of(folder, *TABLES)
    return [*tables, folder / "images"] if tables and (folder / "images").is_dir() else None


def _load(folder: Path, reading: Reading) -> Dataset:
    """The official split: 5,994 birds to train, 5,794 to test."""
    images, labels, split, names = (_table(folder / name) for name in TABLES)
    strange = next((number for number in images if number not in labels or number not in split), None)
    if strange is not None or not set(labels.values()) <= set(names):
        raise DataError(f"{folder}: the tables of CUB-200-2011 do not fit together; unpack them again")
    rows: dict[str, list[str]] = {"1": [], "0": []}
    for number in images:
        rows.setdefault(split[number], []).append(number)
    train, test = (
        Files([folder / "images" / images[i] for i in rows[part]], [names[labels[i]] for i in rows[part]])
        for part in ("1", "0")
    )
    return lazy("cub200", list(names.values()), train, test, folder, reading)


def _table(path: Path) -> dict[str, str]:
    """Lines of a number and a value."""
    table: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split(maxsplit=1)
        if len(words) == 1:
            raise DataError(f"{path}, line {number}: {line!r} is not a number and a value; unpack it again")
        if words:
            table[words[0]] = words[1].strip()
    return table


CUB200 = DatasetInfo(
    name="cub200",
    title="CUB-200-2011",
    classes=200,
    licence="see source",
    source="https://www.vision.caltech.edu/datasets/cub_200_2011/",
    find=_find,
    load=_load,
    files=(
        remote(
            ("https://data.caltech.edu/records/65de6-vp158/files",), "CUB_200_2011.tgz", 1_150_585_339,
            "97eceeb196236b17998738112f37df78", "CUB_200_2011",
        ),
    ),
    folders=("CUB_200_2011",),
)  # fmt: skip

BENCHMARK = Benchmark("cub200", "Split CUB-200", tasks=10, crop=0.875, datasets=("cub200",))
