"""ImageNet-Subset: 100 classes of ImageNet, which nobody may pass on; a list says which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protosteer.data.datasets import Dataset
from protosteer.data.folders import name_classes, read_folder, read_list
from protosteer.data.sets.base import Benchmark, DatasetInfo, Reading, all_of, lazy

LISTS = ("train_100.txt", "val_100.txt")


def _find(folder: Path) -> Sequence[Path] | None:
    lists = all_of(folder, *LISTS)
    if lists:
        return lists
    halves = [folder / "train", folder / "val"]
    wanted = all_of(folder, "classes.txt")
    return [*wanted, *halves] if wanted and all(half.is_dir() for half in halves) else None


def _load(folder: Path, reading: Reading) -> Dataset:
    lists = all_of(folder, *LISTS)
    if lists:
        classes, (train, test) = name_classes(*(read_list(path) for path in lists))
    else:
        lines = (folder / "classes.txt").read_text(encoding="utf-8").splitlines()
        classes = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
        train, test = (read_folder(folder / half, classes) for half in ("train", "val"))
    return lazy("imagenet-subset", classes, train, test, folder, reading)


IMAGENET_SUBSET = DatasetInfo(
    name="imagenet-subset",
    title="ImageNet-Subset",
    classes=100,
    licence="non-commercial",
    source="https://www.image-net.org/download.php",
    find=_find,
    load=_load,
    folders=("imagenet100", "imagenet-100", "imagenet"),
    by_hand="get ILSVRC2012 from https://www.image-net.org/download.php and put train/WNID/*.JPEG and "
    "val/WNID/*.JPEG into {folder}, with train_100.txt and val_100.txt (lines: path number) or a classes.txt "
    "of 100 WNIDs",
    note="Which 100 classes is for the list to say; most published runs use train_100.txt and val_100.txt "
    "of the PODNet and DER code.",
)

BENCHMARK = Benchmark(
    "imagenet-subset", "Split ImageNet-subset", tasks=10, crop=0.875, datasets=("imagenet-subset",)
)
