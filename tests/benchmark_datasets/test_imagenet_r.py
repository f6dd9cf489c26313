"""ImageNet-R, whose split is given by lists or drawn."""

from dataclasses import replace
from pathlib import Path

from expect import expect_error
from protosteer.data.datasets.base import Reading
from protosteer.data.datasets.registry import DATASETS, find_dataset, open_dataset
from protosteer.errors import DataError
from set_toys import READING, SMALL, save


def write_imagenet_r(folder, classes=3, per_class=10):
    for place in range(classes):
        for i in range(per_class):
            save(folder / f"n0000000{place}" / f"art_{i}.jpg", (place * 40, i * 20, 0))
    (folder / "README.txt").write_text("n00000000 tench")
    return folder


def test_imagenet_r_without_lists_is_split_by_a_fixed_seed(tmp_path):
    folder = write_imagenet_r(tmp_path / "imagenet-r")
    before = sorted(folder.rglob("*"))
    info = find_dataset("imagenet-r")
    assert info.locate(tmp_path) == info.locate(folder) == folder
    dataset = info.load(folder, READING)
    assert dataset.classes == ["n00000000", "n00000001", "n00000002"]
    assert dataset.train.labels.bincount().tolist() == [8] * 3 and dataset.test.labels.bincount().tolist() == [2] * 3
    names = {dataset.test.images.name(row) for row in range(6)}
    assert names == {info.load(folder, READING).test.images.name(row) for row in range(6)}
    assert not names & {dataset.train.images.name(row) for row in range(24)}
    assert sorted(folder.rglob("*")) == before and list(dataset.checksums) == ["images"]
    with expect_error("damaged-file", DataError):
        open_dataset("imagenet-r", tmp_path, READING)


def test_imagenet_r_by_lists(tmp_path, monkeypatch):
    folder = write_imagenet_r(tmp_path / "imagenet-r", classes=2, per_class=3)
    (folder / "train.txt").write_text("n00000001/art_2.jpg 1\nn00000000/art_0.jpg 0\n")
    (folder / "test.txt").write_text("imagenet-r/n00000000/art_1.jpg 0\n")
    monkeypatch.setitem(DATASETS, "imagenet-r", replace(find_dataset("imagenet-r"), classes=2))
    dataset = open_dataset("imagenet-r", tmp_path, READING)
    assert dataset.train.labels.tolist() == [1, 0] and dataset.test.labels.tolist() == [0]
    assert Path(dataset.train.images.name(0)) == folder / "n00000001" / "art_2.jpg"
    assert set(dataset.checksums) == {"images", "train.txt", "test.txt"}


def test_unreadable_files_are_skipped_on_request(tmp_path):
    folder = write_imagenet_r(tmp_path / "imagenet-r")
    for name in ("art_0.jpg", "art_1.jpg"):
        (folder / "n00000001" / name).write_bytes(b"broken")
    said = []
    dataset = find_dataset("imagenet-r").load(folder, Reading(SMALL, True, said.append))
    assert len(dataset.train.images) + len(dataset.test.images) == 28
    told = " ".join(said)
    assert "n00000001/art_0.jpg" in told and "n00000001/art_1.jpg" in told
    lazy = find_dataset("imagenet-r").load(folder, READING)
    with expect_error("unreadable-image", DataError):
        for part in (lazy.train, lazy.test):
            part.images.pixels(range(len(part.images)))
