"""Data sets of image files, each from small files in its official layout."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from expect import expect_error
from protosteer.data.datasets.registry import DATASETS, find_dataset, open_dataset
from protosteer.data.labelled import Dataset
from protosteer.errors import DataError
from set_toys import READING, save


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def tiny_imagenet(root: Path) -> None:
    for wnid in ("n02", "n01"):
        for i in range(2):
            save(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG")
        write(root / "train" / wnid / f"{wnid}_boxes.txt", f"{wnid}_0.JPEG\t0\t0\t62\t62")
    for i in range(3):
        save(root / "val" / "images" / f"val_{i}.JPEG")
    write(root / "val" / "val_annotations.txt", *(f"val_{i}.JPEG\tn0{1 + i % 2}\t0\t32\t44\t62" for i in range(3)))
    save(root / "test" / "images" / "test_0.JPEG")


def food101(root: Path) -> None:
    for name in ("bibimbap", "apple_pie"):
        for i in range(3):
            save(root / "images" / name / f"{i}.jpg")
    write(root / "meta" / "train.txt", "bibimbap/0", "bibimbap/2", "apple_pie/1", "apple_pie/0")
    write(root / "meta" / "test.txt", "apple_pie/2", "bibimbap/1")
    write(root / "meta" / "labels.txt", "Apple pie", "Bibimbap")


def pets(root: Path) -> None:
    for name in ("Abyssinian_1", "Abyssinian_2", "american_bulldog_1", "american_bulldog_10"):
        save(root / "images" / f"{name}.jpg")
    write(root / "annotations" / "trainval.txt", "Abyssinian_2 1 1 1", "american_bulldog_10 2 2 1")
    write(root / "annotations" / "test.txt", "american_bulldog_1 2 2 1", "Abyssinian_1 1 1 1")


def cars(root: Path) -> None:
    for half, count in (("train", 3), ("test", 2)):
        for i in range(count):
            save(root / f"cars_{half}" / f"{i + 1:05}.jpg")

    def annotations(rows: list[tuple[int, str]]) -> Any:
        kind = [("bbox_x1", "O"), ("class", "O"), ("fname", "O")]
        return {"annotations": np.array([[(3, number, name) for number, name in rows]], dtype=kind)}

    (root / "devkit").mkdir()
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": np.array([["Audi TT", "BMW M3"]], dtype=object)})
    train = annotations([(2, "00001.jpg"), (1, "00002.jpg"), (2, "00003.jpg")])
    savemat(root / "devkit" / "cars_train_annos.mat", train)
    savemat(root / "cars_test_annos_withlabels.mat", annotations([(1, "00001.jpg"), (2, "00002.jpg")]))


def caltech101(root: Path) -> None:
    for name in ("accordion", "yin_yang", "BACKGROUND_Google"):
        for i in range(5):
            save(root / name / f"image_{i:04}.jpg")


def halves(root: Path, names: tuple[str, ...] = ("10", "2")) -> None:
    for half, count in (("train", 2), ("test", 1)):
        for name in names:
            for i in range(count):
                save(root / half / name / f"{i}.jpg")


wnid_halves = partial(halves, names=("n01498041", "n01531178"))

# How to write it, the folder's name, classes, and labels of training and test images.
FORMS = {
    "tiny-imagenet": (tiny_imagenet, "tiny-imagenet-200", ["n01", "n02"], [0, 0, 1, 1], [0, 1, 0]),
    "food101": (food101, "food-101", ["apple_pie", "bibimbap"], [1, 1, 0, 0], [0, 1]),
    "pets": (pets, "oxford-iiit-pet", ["Abyssinian", "american_bulldog"], [0, 1], [1, 0]),
    "cars": (cars, "stanford_cars", ["Audi TT", "BMW M3"], [1, 0, 1], [0, 1]),
    "caltech101": (caltech101, "101_ObjectCategories", ["accordion", "yin_yang"], [0] * 4 + [1] * 4, [0, 1]),
    "omnibenchmark": (halves, "omnibenchmark", ["10", "2"], [0, 0, 1, 1], [0, 1]),
    "vtab": (halves, "vtab", ["10", "2"], [0, 0, 1, 1], [0, 1]),
    "imagenet-a": (wnid_halves, "imagenet-a", ["n01498041", "n01531178"], [0, 0, 1, 1], [0, 1]),
    "imagenet-r": (wnid_halves, "imagenet-r", ["n01498041", "n01531178"], [0, 0, 1, 1], [0, 1]),
}


@pytest.mark.parametrize("name", FORMS)
def test_small_files_in_the_official_layout_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, place, classes, train, test = FORMS[name]
    (tmp_path / place).mkdir()
    make(tmp_path / place)
    info = find_dataset(name)
    monkeypatch.setitem(DATASETS, name, replace(info, classes=2, md5={}))
    assert info.locate(tmp_path) == info.locate(tmp_path / place) == tmp_path / place
    dataset: Dataset = open_dataset(name, tmp_path, READING)
    assert dataset.classes == classes
    assert dataset.train.labels.tolist() == train and dataset.test.labels.tolist() == test
    for part in (dataset.train, dataset.test):
        assert part.images.pixels(range(len(part.images))).shape[0] == len(part.labels)
    assert "images" in dataset.checksums
    monkeypatch.setitem(DATASETS, name, info)
    with expect_error("checksum" if info.md5 else "damaged-file", DataError):
        open_dataset(name, tmp_path, READING)  # too few classes, or other files than the official ones


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("tiny-imagenet", "val/val_annotations.txt", "val_0.JPEG\n"),
        ("pets", "annotations/test.txt", "american_bulldog_1\n"),
        ("pets", "annotations/test.txt", "american_bulldog_1 1 2 1\n"),
        ("cars", "devkit/cars_train_annos.mat", "MATLAB 5.0"),
        ("food101", "meta/test.txt", "apple_pie/999\n"),
    ],
)
def test_damaged_tables_are_named(name: str, file: str, content: str, tmp_path: Path) -> None:
    make, place, *_ = FORMS[name]
    (tmp_path / place).mkdir()
    make(tmp_path / place)
    (tmp_path / place / file).write_text(content)
    with pytest.raises(DataError) as caught:
        find_dataset(name).load(tmp_path / place, READING)
    assert caught.value.code in ("damaged-file", "missing-file", "unreadable-file")


@pytest.mark.parametrize("name", FORMS)
def test_what_is_missing_is_said_with_where_it_goes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = find_dataset(name)
    monkeypatch.setitem(DATASETS, name, replace(info, files=()))
    with expect_error("missing-dataset", DataError, name=name) as caught:
        open_dataset(name, tmp_path, READING)
    assert info.files or str(tmp_path / name) in str(caught.value)
