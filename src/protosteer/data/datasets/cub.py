"""CUB-200-2011: 200 species of birds, with four tables of labels, names and the split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protosteer.data.class_folders import Files
from protosteer.data.datasets.base import Benchmark, Contents, DatasetInfo, Reading, all_of, lazy
from protosteer.data.downloads import Remote
from protosteer.data.image_files import text_lines
from protosteer.errors import DataError

TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")


def _find(folder: Path) -> Sequence[Path] | None:
    tables = all_of(folder, *TABLES)
    return [*tables, folder / "images"] if tables and (folder / "images").is_dir() else None


def _read(files: Sequence[Path], reading: Reading) -> Contents:
    """Read the official split: 5,994 training and 5,794 test images."""
    *tables, folder = files
    try:
        images, labels, split, names = (
            dict(line.split(maxsplit=1) for _, line in text_lines(table)) for table in tables
        )
        halves: dict[str, list[tuple[Path, str]]] = {"1": [], "0": []}
        for number, image in images.items():
            halves[split[number]].append((folder / image, names[labels[number]]))
    except (KeyError, ValueError) as error:
        message = f"{folder.parent}: the tables of CUB-200-2011 do not fit together ({error}); unpack them again"
        raise DataError(message, code="damaged-file", path=folder.parent) from error
    return lazy(list(names.values()), Files.of(halves["1"]), Files.of(halves["0"]), folder.parent, reading)


CUB200 = DatasetInfo(
    name="cub200",
    title="CUB-200-2011",
    classes=200,
    licence="see source",
    source="https://www.vision.caltech.edu/datasets/cub_200_2011/",
    find=_find,
    read=_read,
    files=(
        Remote(
            "CUB_200_2011.tgz", 1_150_585_339, ("https://data.caltech.edu/records/65de6-vp158/files",),
            "97eceeb196236b17998738112f37df78", "CUB_200_2011",
        ),
    ),
)  # fmt: skip

BENCHMARK = Benchmark("cub200", "Split CUB-200", tasks=10, crop=0.875, datasets=("cub200",))
