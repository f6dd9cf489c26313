"""notMNIST in every form that is known: letter folders, halves, idx files."""

import pytest
import torch

from expect import expect_error
from protosteer.data.datasets.base import Reading
from protosteer.data.datasets.notmnist import BROKEN
from protosteer.data.datasets.registry import open_dataset
from protosteer.errors import DataError
from set_toys import READING, SMALL, save, write_idx


def write_letters(folder, per_letter):
    for place, letter in enumerate("ABCDEFGHIJ"):
        for i in range(per_letter):
            save(folder / letter / f"{i:02d}.png", place * 20 + i, "L", (28, 28))


def test_notmnist_of_the_five_datasets_has_train_and_test(tmp_path):
    write_letters(tmp_path / "notMNIST" / "Train", 3)
    write_letters(tmp_path / "notMNIST" / "Test", 2)
    (tmp_path / "notMNIST" / "Train" / "A" / BROKEN[0]).write_bytes(b"")
    dataset = open_dataset("notmnist", tmp_path, READING)
    assert dataset.classes == list("ABCDEFGHIJ") and dataset.train.labels.bincount().tolist() == [3] * 10
    assert dataset.test.labels.bincount().tolist() == [2] * 10
    pixels = dataset.train.images.pixels([4])[0]
    assert pixels.shape == (3, 32, 32) and (pixels[:, 2:30, 2:30] == 21).all() and pixels[:, :2].sum() == 0
    assert list(dataset.checksums) == ["images"] and dataset.checksums["images"].startswith("sha256:")


def test_notmnist_small_is_split_by_a_fixed_seed(tmp_path):
    write_letters(tmp_path / "notMNIST_small", 10)
    (tmp_path / "notMNIST_small" / "F" / BROKEN[1]).write_bytes(b"")
    first, second = (open_dataset("notmnist", tmp_path, READING) for _ in range(2))
    assert first.train.labels.bincount().tolist() == [9] * 10 and first.test.labels.bincount().tolist() == [1] * 10
    rows = range(10)
    assert torch.equal(first.test.images.pixels(rows), second.test.images.pixels(rows))
    assert first.train.images.array.untyped_storage().nbytes() == 90 * 32 * 32  # type: ignore[attr-defined]


def test_a_broken_letter_stops_the_reading_or_is_left_out_on_request(tmp_path):
    write_letters(tmp_path / "notmnist", 10)
    bad = tmp_path / "notmnist" / "C" / "03.png"
    bad.write_bytes(b"")
    with expect_error("unreadable-image", DataError):
        open_dataset("notmnist", tmp_path, READING)
    said = []
    dataset = open_dataset("notmnist", tmp_path, Reading(SMALL, True, said.append))
    assert len(dataset.train.images) + len(dataset.test.images) == 99
    assert said == [f"{bad} cannot be read as an image; skipped"]


@pytest.mark.parametrize("prefixes", [("train", "t10k"), ("t10k",)])
def test_notmnist_as_idx_files(tmp_path, prefixes):
    write_idx(tmp_path / "notmnist", prefixes)
    dataset = open_dataset("notmnist", tmp_path, READING)
    counts = (100, 100) if len(prefixes) == 2 else (90, 10)
    assert (len(dataset.train.images), len(dataset.test.images)) == counts
    assert len(dataset.checksums) == 2 * len(prefixes)
    assert all(value.startswith("sha256:") for value in dataset.checksums.values())
