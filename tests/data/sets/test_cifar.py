"""CIFAR's official pickles and records, and pickles that want more than arrays."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from protosteer.data.sets.catalogue import open_dataset
from protosteer.data.sets.cifar import cifar_files, read_cifar10, read_cifar100
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError


@pytest.fixture
def folder(tmp_path):
    """Ten images in the official form: rows of 3072 bytes, colour planes one after the other."""
    rows = np.random.default_rng(0).integers(0, 256, (10, 3072), dtype=np.uint8)
    for split in ("train", "test"):
        table = {"data": rows, "fine_labels": list(range(10)), "coarse_labels": [0] * 10}
        (tmp_path / split).write_bytes(pickle.dumps(table, protocol=2))
    names = {"fine_label_names": [f"class {i}" for i in range(100)]}
    (tmp_path / "meta").write_bytes(pickle.dumps(names, protocol=2))
    return tmp_path, rows


def test_pixels_labels_and_names(folder):
    path, rows = folder
    pixels, labels, names = read_cifar100(path, "train")
    assert pixels.shape == (10, 3, 32, 32) and pixels.dtype == torch.uint8
    assert pixels[4, 2, 3, 7] == rows[4, 2 * 1024 + 3 * 32 + 7]
    assert labels.tolist() == list(range(10)) and names[99] == "class 99"


def test_a_pickle_that_would_run_something_is_refused(folder):
    path, _ = folder

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {path / 'attacked'}",)

    (path / "train").write_bytes(pickle.dumps({"data": Attack()}))
    with pytest.raises(DataError, match="asks for .*system, which no CIFAR file needs"):
        read_cifar100(path, "train")
    assert not (path / "attacked").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle"])
def test_damaged_and_missing_files_are_named(folder, content):
    path, _ = folder
    (path / "test").write_bytes(content)
    with pytest.raises(DataError, match="test is not a CIFAR-100 file"):
        read_cifar100(path, "test")
    (path / "test").unlink()
    with pytest.raises(DataError, match="test is missing"):
        read_cifar100(path, "test")


def test_tables_that_do_not_fit_are_refused(folder):
    path, rows = folder
    (path / "test").write_bytes(pickle.dumps({"data": rows, "labels": [0] * 10}))
    with pytest.raises(DataError, match="test is not a CIFAR-100 file: it has no 'fine_labels'"):
        read_cifar100(path, "test")
    (path / "test").write_bytes(pickle.dumps({"data": rows, "fine_labels": [0] * 9}))
    with pytest.raises(DataError, match="9 labels but pixels of shape"):
        read_cifar100(path, "test")
    (path / "test").write_bytes(pickle.dumps({"data": rows, "fine_labels": [100] * 10}))
    with pytest.raises(DataError, match="labels run to 100"):
        read_cifar100(path, "test")
    (path / "meta").write_bytes(pickle.dumps({"fine_label_names": ["a"]}))
    with pytest.raises(DataError, match="meta names 1 classes, not 100"):
        read_cifar100(path, "train")


def some_rows(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def write_cifar10(path, binary):
    """Three images per batch, labelled batch number, 0, 9."""
    every = []
    for batch in range(1, 7):
        rows, labels = some_rows(3, batch), [batch, 0, 9]
        name = f"data_batch_{batch}" if batch < 6 else "test_batch"
        if binary:
            records = np.concatenate([np.array(labels, np.uint8)[:, None], rows], axis=1)
            (path / f"{name}.bin").write_bytes(records.tobytes())
        else:
            table = {"data": rows, "labels": labels, "batch_label": "x", "filenames": ["a.png"] * 3}
            (path / name).write_bytes(pickle.dumps(table, protocol=2))
        every.append(rows)
    names = [f"kind {i}" for i in range(10)]
    if binary:
        (path / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    else:
        (path / "batches.meta").write_bytes(pickle.dumps({"label_names": names, "num_vis": 3072}, protocol=2))
    return np.concatenate(every), names


@pytest.mark.parametrize("binary", [False, True])
def test_cifar10_batches_follow_their_numbers(tmp_path, binary):
    assert cifar_files(tmp_path, 10) is None
    rows, names = write_cifar10(tmp_path, binary)
    pixels, labels, classes = read_cifar10(tmp_path, "train")
    assert classes == names and labels.tolist() == [1, 0, 9, 2, 0, 9, 3, 0, 9, 4, 0, 9, 5, 0, 9]
    assert torch.equal(pixels, torch.from_numpy(rows[:15].reshape(-1, 3, 32, 32)))
    pixels, labels, _ = read_cifar10(tmp_path, "test")
    assert labels.tolist() == [6, 0, 9]
    assert torch.equal(pixels, torch.from_numpy(rows[15:].reshape(-1, 3, 32, 32)))
    assert len(cifar_files(tmp_path, 10) or []) == 7 and cifar_files(tmp_path, 100) is None


def test_cifar100_records_have_a_coarse_label_first(tmp_path):
    rows = some_rows(4, 0)
    records = np.concatenate(
        [np.full((4, 1), 19, np.uint8), np.array([[7], [99], [0], [7]], np.uint8), rows], axis=1
    )
    for split in ("train", "test"):
        (tmp_path / f"{split}.bin").write_bytes(records.tobytes())
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"class {i}" for i in range(100)))
    pixels, labels, names = read_cifar100(tmp_path, "train")
    assert labels.tolist() == [7, 99, 0, 7] and names[7] == "class 7"
    assert torch.equal(pixels, torch.from_numpy(rows.reshape(-1, 3, 32, 32)))
    assert [path.name for path in cifar_files(tmp_path, 100) or []] == [
        "train.bin",
        "test.bin",
        "fine_label_names.txt",
    ]
    (tmp_path / "train.bin").write_bytes(records.tobytes()[:-1])
    with pytest.raises(DataError, match="train.bin has 12295 bytes, which is no multiple of 3074"):
        read_cifar100(tmp_path, "train")


def test_python_files_come_first(tmp_path):
    write_cifar10(tmp_path, binary=True)
    write_cifar10(tmp_path, binary=False)
    assert (cifar_files(tmp_path, 10) or [])[0].name == "data_batch_1"
    for path in tmp_path.glob("*.bin"):
        path.write_bytes(b"damaged")
    assert len(read_cifar10(tmp_path, "train")[0]) == 15


@pytest.mark.slow
def test_the_real_files(shared, tmp_path):
    archive, tool = shared / "data" / "cifar100_lossless.zip", shared / "data" / "unpack_cifar.py"
    if not archive.exists():
        pytest.skip(f"no CIFAR-100: {archive} does not exist")
    subprocess.run([sys.executable, tool, archive, tmp_path], check=True, capture_output=True)
    half = (0.5, 0.5, 0.5)
    dataset = open_dataset("cifar100", tmp_path, Preprocessing(32, half, half), download=False)
    assert dataset.checksums["test"] == "md5:f0ef6b0ae62326f3e7ffdfab6717acfc" and len(dataset.checksums) == 3
    assert len(dataset.train.images) == 50000 and dataset.train.labels.bincount().tolist() == [500] * 100
    assert len(dataset.test.images) == 10000 and dataset.test.labels.bincount().tolist() == [100] * 100
    assert dataset.classes[0] == "apple" and dataset.classes[99] == "worm"

    with (tmp_path / "cifar-100-python" / "test").open("r+b") as file:
        file.seek(5000)
        file.write(b"\0\0\0\0")
    with pytest.raises(DataError, match="test has md5 .*official file has f0ef6b0a.*datasets get cifar100"):
        open_dataset("cifar100", tmp_path, Preprocessing(32, half, half), download=False)
