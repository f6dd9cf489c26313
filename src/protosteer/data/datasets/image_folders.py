"""Data sets of image files in class folders or with list files: one reader for each layout, one record for each set.

A reader maps the folder of a data set to its classes, training files and test files. `images_info` makes a record of it
and of the names by which the folder is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from protosteer.data.class_folders import Files, read_folder, read_lists, stratified_split
from protosteer.data.datasets.base import Benchmark, DatasetInfo, all_of, damaged_file, lazy
from protosteer.data.downloads import Remote
from protosteer.data.image_files import text_lines
from protosteer.util.files import open_regular

LISTS = ("train.txt", "test.txt")
TEST_SHARE = 0.2

Split = tuple[list[str], Files, Files]  # classes, training files, test files


def images_info(
    read: Callable[[Path], Split], marks: Callable[[Path], list[Path] | None], **record: Any
) -> DatasetInfo:
    """Describe a data set of image files.

    Args:
        read: Reads a folder.
        marks: Returns the files whose checksums are verified; None if the folder does not hold the data set.
        **record: Further fields of `DatasetInfo`.
    """

    def find(folder: Path) -> list[Path] | None:
        verified_files = marks(folder)
        return None if verified_files is None else [folder, *verified_files]

    return DatasetInfo(
        find=find, read=lambda files, reading: lazy(*read(files[0]), files[0], reading), own_folder=True, **record
    )


def halves(folder: Path) -> Split:
    """Read class folders in train/ and in test/."""
    train, test = (read_folder(folder / half) for half in ("train", "test"))
    return sorted({*train.labels, *test.labels}), train, test


def class_folders(folder: Path) -> Split:
    """Read class folders: as train/ and test/ or by lists if there are some, else 80 to 20, drawn with a fixed seed."""
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return halves(folder)
    lists = all_of(folder, *LISTS)
    if lists:
        classes, (train, test) = read_lists(*lists)
        return classes, train, test
    entries = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    files = read_folder(folder, [name for name in entries if name != BACKGROUND])
    train, test = (files.rows(rows) for rows in stratified_split(files.labels, TEST_SHARE))
    return sorted(set(files.labels)), train, test


BACKGROUND = "BACKGROUND_Google"  # of Caltech-101: no class


def tiny_imagenet(folder: Path) -> Split:
    """Read train/WNID/images, and val/images by val/val_annotations.txt; the labels of test/ are not published."""
    train = read_folder(folder / "train")
    table = folder / "val" / "val_annotations.txt"
    rows = [line.split("\t") for _, line in text_lines(table)]
    if any(len(row) < 2 for row in rows):
        raise damaged_file(table, "has lines without a class")
    test = Files.of((folder / "val" / "images" / name, label) for name, label, *_ in rows)
    return sorted(set(train.labels)), train, test


def food101(folder: Path) -> Split:
    """Read images/CLASS/ID.jpg by meta/train.txt and meta/test.txt, whose lines are CLASS/ID."""
    train, test = (
        Files.of((folder / "images" / f"{name}.jpg", name.partition("/")[0]) for _, name in text_lines(table))
        for table in (folder / "meta" / half for half in LISTS)
    )
    return sorted({*train.labels, *test.labels}), train, test


def pets(folder: Path) -> Split:
    """Read images/NAME.jpg by annotations/trainval.txt and test.txt; lines begin with BREED_NUMBER and a class number."""
    breeds: dict[int, str] = {}

    def rows(table: Path) -> Iterator[tuple[Path, str]]:
        for _, line in text_lines(table):
            name, number, *_ = [*line.split(), ""]
            breed = name.rpartition("_")[0]
            if not number.isdecimal() or breeds.setdefault(int(number), breed) != breed:
                raise damaged_file(table, f"has the line {line!r}")
            yield folder / "images" / f"{name}.jpg", breed

    train, test = (Files.of(rows(folder / "annotations" / half)) for half in ("trainval.txt", "test.txt"))
    return [breeds[number] for number in sorted(breeds)], train, test


def cars(folder: Path) -> Split:
    """Read cars_train/ and cars_test/ by the tables of the devkit, which are Matlab files."""
    names = [str(name) for name in _matlab(folder / "devkit" / "cars_meta.mat", "class_names")]

    def half(images: Path, table: Path) -> Files:
        rows = _matlab(table, "annotations")
        try:
            return Files.of((images / str(row["fname"]), names[int(row["class"]) - 1]) for row in rows)
        except (IndexError, KeyError, ValueError) as error:
            raise damaged_file(table, f"is not a table of the devkit ({error})") from error

    train = half(folder / "cars_train", folder / "devkit" / "cars_train_annos.mat")
    return names, train, half(folder / "cars_test", folder / CARS_TEST)


CARS_TEST = "cars_test_annos_withlabels.mat"


def _matlab(path: Path, name: str) -> list[Any]:
    from scipy.io import loadmat

    try:
        with open_regular(path) as file:
            return list(np.atleast_1d(loadmat(file, variable_names=[name], squeeze_me=True)[name]))
    except Exception as error:  # a damaged file makes scipy raise nearly anything
        raise damaged_file(path, f"is not a table of the devkit ({error})") from error


def _all_there(*names: str, verified: tuple[str, ...] = ()) -> Callable[[Path], list[Path] | None]:
    """Recognise a folder by files and folders in it, of which some are verified."""
    return lambda folder: (
        [folder / name for name in verified] if all((folder / name).exists() for name in (*names, *verified)) else None
    )


def _wnid_folders(folder: Path) -> list[Path] | None:
    """Recognise a folder by a class folder such as n01443537, in itself or in train/ and test/; lists are verified."""
    if not folder.is_dir():
        return None
    places = [folder] if not (folder / "train").is_dir() else [folder / "train", folder / "test"]
    has_classes = all(place.is_dir() and any(map(_is_wnid, place.iterdir())) for place in places)
    return (all_of(folder, *LISTS) or []) if has_classes else None


def _is_wnid(entry: Path) -> bool:
    return entry.name[:1] == "n" and entry.name[1:].isdecimal() and len(entry.name) == 9 and entry.is_dir()


_BERKELEY = ("https://people.eecs.berkeley.edu/~hendrycks",)
_PETS = ("https://www.robots.ox.ac.uk/~vgg/data/pets/data",)
_DRAWN = (
    "It was made as a test set, and the splits of published runs differ. Folders train/ and test/, or lists train.txt "
    "and test.txt, in its folder decide; without them 80 to 20 in every class, drawn with a fixed seed."
)
_PILOT = "https://github.com/sun-hailong/LAMDA-PILOT"

IMAGENET_R = images_info(
    class_folders, _wnid_folders, name="imagenet-r", title="ImageNet-R", classes=200, licence="see source",
    source="https://github.com/hendrycks/imagenet-r", note=_DRAWN,
    files=(Remote("imagenet-r.tar", 2_191_079_936, _BERKELEY, "a61312130a589d0ca1a8fca1f2bd3337", "imagenet-r"),),
)  # fmt: skip
IMAGENET_A = images_info(
    class_folders, _wnid_folders, name="imagenet-a", title="ImageNet-A", classes=200, licence="MIT",
    source="https://github.com/hendrycks/natural-adv-examples", note=_DRAWN,
    files=(Remote("imagenet-a.tar", 687_552_512, _BERKELEY, "c3e55429088dc681f30d81f4726b6595", "imagenet-a"),),
)  # fmt: skip
TINY_IMAGENET = images_info(
    tiny_imagenet, _all_there("train", "val/images", verified=("val/val_annotations.txt",)), name="tiny-imagenet",
    title="Tiny-ImageNet", classes=200, licence="non-commercial", source="http://cs231n.stanford.edu/",
    files=(
        Remote(
            "tiny-imagenet-200.zip", 248_100_043, ("http://cs231n.stanford.edu",), "90528d7ca1a48142e341f4ef8d21d0de",
            "tiny-imagenet-200",
        ),
    ),
    note="The validation images are the test images: labels of the others are not published.",
)  # fmt: skip
FOOD101 = images_info(
    food101, _all_there("images", verified=("meta/train.txt", "meta/test.txt")), name="food101", title="Food-101",
    classes=101, licence="see source", source="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
    files=(
        Remote(
            "food-101.tar.gz", None, ("http://data.vision.ee.ethz.ch/cvl",), "85eeb15f3717b99a5da872d97d918f87",
            "food-101",
        ),
    ),
)  # fmt: skip
PETS = images_info(
    pets, _all_there("images", verified=("annotations/trainval.txt", "annotations/test.txt")), name="pets",
    title="Oxford-IIIT Pets", classes=37, licence="CC BY-SA 4.0", source="https://www.robots.ox.ac.uk/~vgg/data/pets/",
    folders=("oxford-iiit-pet",),
    files=(
        Remote("images.tar.gz", 791_918_971, _PETS, "5c4f3ee8e5d25df40f4fd59a7f44e54c", "images"),
        Remote("annotations.tar.gz", None, _PETS, "95a8c909bbe2e81eed6a22bccdf3f68f", "annotations"),
    ),
)  # fmt: skip
CARS = images_info(
    cars, _all_there("cars_train", "cars_test", verified=("devkit/cars_train_annos.mat", "devkit/cars_meta.mat", CARS_TEST)),
    name="cars", title="Stanford Cars", classes=196, licence="non-commercial",
    source="https://ai.stanford.edu/~jkrause/cars/car_dataset.html", folders=("stanford_cars",),
    md5={CARS_TEST: "b0a2b23655a3edd16d84508592a98d10"},
    by_hand="its page is gone; put cars_train/, cars_test/, devkit/ and cars_test_annos_withlabels.mat of a copy into "
    "{folder}",
)  # fmt: skip
CALTECH101 = images_info(
    class_folders, _all_there("accordion", "yin_yang"), name="caltech101", title="Caltech-101", classes=101,
    licence="CC BY 4.0", source="https://data.caltech.edu/records/mzrjq-6wc02",
    folders=("101_ObjectCategories", "caltech-101/101_ObjectCategories", "caltech101/101_ObjectCategories"),
    by_hand="unpack caltech-101.zip from https://data.caltech.edu/records/mzrjq-6wc02 (md5 "
    "3138e1922a9193bfa496528edbbc45d0), and 101_ObjectCategories.tar.gz in it, into {folder}",
    note="It has no official split. Lists train.txt and test.txt in its folder decide; without them 80 to 20 in every "
    "class, drawn with a fixed seed.",
)  # fmt: skip
OMNIBENCHMARK = images_info(
    halves, _all_there("train", "test"), name="omnibenchmark", title="OmniBenchmark, 300 classes", classes=300,
    licence="see source", source=_PILOT,
    by_hand=f"get the 300 classes that {_PILOT} links, and put train/ and test/ with their class folders into {{folder}}",
    note="The subset of RanPAC, EASE and others, chosen by the authors of that page. Its checksum is not published.",
)  # fmt: skip
VTAB = images_info(
    halves, _all_there("train", "test"), name="vtab", title="VTAB, 50 classes", classes=50, licence="see source",
    source=_PILOT,
    by_hand=f"get the 50 classes that {_PILOT} links, and put train/ and test/ with their class folders into {{folder}}",
    note="Ten classes each of five of VTAB's data sets, chosen by the authors of that page; in the order of the folders' "
    "names. Its checksum is not published.",
)  # fmt: skip

INFOS = (
    IMAGENET_R, IMAGENET_A, TINY_IMAGENET, FOOD101, PETS, CARS, CALTECH101, OMNIBENCHMARK, VTAB,
)  # fmt: skip
BENCHMARKS = (
    Benchmark("imagenet-r", "Split ImageNet-R", tasks=10, crop=0.875, datasets=("imagenet-r",)),
    Benchmark("imagenet-a", "Split ImageNet-A", tasks=10, crop=0.875, datasets=("imagenet-a",)),
    Benchmark("tiny-imagenet", "Split Tiny-ImageNet", tasks=10, crop=1.0, datasets=("tiny-imagenet",)),
    Benchmark("food101", "Split Food-101", tasks=10, crop=0.875, datasets=("food101",)),
    Benchmark("pets", "Split Pets", tasks=5, crop=0.875, datasets=("pets",)),
    Benchmark("cars", "Split Cars", tasks=10, crop=0.875, datasets=("cars",)),
    Benchmark("caltech101", "Split Caltech-101", tasks=10, crop=0.875, datasets=("caltech101",)),
    Benchmark("omnibenchmark", "Split OmniBenchmark", tasks=10, crop=0.875, datasets=("omnibenchmark",)),
    Benchmark("vtab", "Split VTAB", tasks=5, crop=0.875, datasets=("vtab",)),
)
