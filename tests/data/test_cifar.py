"""CIFAR-100's official pickles, and pickles that want more than arrays."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from protosteer.data.cifar import read_cifar100
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


@pytest.mark.slow
def test_the_real_files(shared, tmp_path):
    archive, tool = shared / "data" / "cifar100_lossless.zip", shared / "data" / "unpack_cifar.py"
    if not archive.exists():
        pytest.skip(f"no CIFAR-100: {archive} does not exist")
    subprocess.run([sys.executable, tool, archive, tmp_path], check=True, capture_output=True)
    pixels, labels, names = read_cifar100(tmp_path / "cifar-100-python", "test")
    assert hashlib.md5((tmp_path / "cifar-100-python" / "test").read_bytes()).hexdigest() == (
        "f0ef6b0ae62326f3e7ffdfab6717acfc"
    )
    assert pixels.shape == (10000, 3, 32, 32) and labels.bincount().tolist() == [100] * 100
    assert names[0] == "apple" and names[99] == "worm"
