"""ImageNet-Subset: 100 classes of ImageNet named by a list; ImageNet may not be redistributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protosteer.data.class_folders import read_folder, read_lists
from protosteer.data.datasets.base import Benchmark, Contents, DatasetInfo, Reading, all_of, lazy
from protosteer.data.image_files import text_lines


def _find(folder: Path) -> Sequence[Path] | None:
    lists = all_of(folder, "train_100.txt", "val_100.txt")
    if lists:
        return lists
    halves = [folder / "train", folder / "val"]
    tables = all_of(folder, "classes.txt")
    return [*tables, *halves] if tables and all(half.is_dir() for half in halves) else None


def _read(files: Sequence[Path], reading: Reading) -> Contents:
    if len(files) == 2:
        classes, (train, test) = read_lists(*files)
    else:
        classes = [line.split()[0] for _, line in text_lines(files[0])]
        train, test = (read_folder(half, classes) for half in files[1:])
    return lazy(classes, train, test, files[0].parent, reading)


IMAGENET_SUBSET = DatasetInfo(
    name="imagenet-subset",
    title="ImageNet-Subset",
    classes=100,
    licence="non-commercial",
    source="https://www.image-net.org/download.php",
    find=_find,
    read=_read,
    folders=("imagenet100", "imagenet-100", "imagenet"),
    by_hand="get ILSVRC2012 from https://www.image-net.org/download.php and put train/WNID/*.JPEG and "
    "val/WNID/*.JPEG into {folder}, with train_100.txt and val_100.txt (lines: path number) or a classes.txt "
    "of 100 WNIDs",
    note="Which 100 classes is for the list to say; most published runs use train_100.txt and val_100.txt "
    "of the PODNet and DER code.",
)

BENCHMARK = Benchmark("imagenet-subset", "Split ImageNet-subset", tasks=10, crop=0.875, datasets=("imagenet-subset",))
