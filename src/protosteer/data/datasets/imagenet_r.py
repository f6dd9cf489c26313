"""ImageNet-R: 200 classes of ImageNet as art, cartoons, toys and the like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protosteer.data.class_folders import read_folder, read_lists, stratified_split
from protosteer.data.datasets.base import Benchmark, Contents, DatasetInfo, Reading, all_of, lazy
from protosteer.data.downloads import Remote

LISTS = ("train.txt", "test.txt")
TEST_SHARE = 0.2


def _find(folder: Path) -> Sequence[Path] | None:
    if not folder.is_dir() or not any(_is_wnid(entry) for entry in folder.iterdir()):
        return None
    return [folder, *(all_of(folder, *LISTS) or ())]


def _is_wnid(entry: Path) -> bool:
    """Return True for a folder named by a WordNet id, such as n01443537."""
    return entry.name[:1] == "n" and entry.name[1:].isdecimal() and len(entry.name) == 9 and entry.is_dir()


def _read(paths: Sequence[Path], reading: Reading) -> Contents:
    """Read the split of train.txt and test.txt, or split every class 80 to 20 with a fixed seed."""
    folder, *lists = paths
    if lists:
        classes, (train, test) = read_lists(*lists)
    else:
        files = read_folder(folder)
        classes = sorted(set(files.labels))
        train, test = (files.rows(rows) for rows in stratified_split(files.labels, TEST_SHARE))
    return lazy(classes, train, test, folder, reading)


IMAGENET_R = DatasetInfo(
    name="imagenet-r",
    title="ImageNet-R",
    classes=200,
    licence="see source",
    source="https://github.com/hendrycks/imagenet-r",
    find=_find,
    read=_read,
    files=(
        Remote(
            "imagenet-r.tar", 2_191_079_936, ("https://people.eecs.berkeley.edu/~hendrycks",),
            "a61312130a589d0ca1a8fca1f2bd3337", "imagenet-r",
        ),
    ),
    own_folder=True,
    note="It was made as a test set, and the 24,000/6,000 splits of published runs differ. Lists train.txt and "
    "test.txt in its folder decide; without them 80 to 20 in every class, drawn with a fixed seed.",
)  # fmt: skip

BENCHMARK = Benchmark("imagenet-r", "Split ImageNet-R", tasks=10, crop=0.875, datasets=("imagenet-r",))
