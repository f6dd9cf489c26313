"""SVHN's .mat files: layout, order, and the digit that is called 10."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.io import savemat

from protosteer.data.sets.svhn import SVHN, read_svhn, svhn_files
from protosteer.errors import DataError
from set_toys import READING


def write(path, labels, dtype=np.uint8):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, len(labels))).astype(dtype)
    savemat(path, {"X": pixels, "y": np.array(labels, dtype=np.uint8)[:, None]})
    return pixels


def test_order_is_kept_and_ten_means_zero(tmp_path):
    pixels = write(tmp_path / "train_32x32.mat", [10, 1, 9, 2, 10])
    images, labels = read_svhn(tmp_path / "train_32x32.mat")
    assert labels.tolist() == [0, 1, 9, 2, 0] and labels.dtype == torch.int64
    assert images.shape == (5, 3, 32, 32) and images.dtype == torch.uint8 and images.is_contiguous()
    assert images[3, 2, 11, 30] == pixels[11, 30, 2, 3]
    assert svhn_files(tmp_path) is None
    write(tmp_path / "test_32x32.mat", [1])
    assert [path.name for path in svhn_files(tmp_path) or []] == ["train_32x32.mat", "test_32x32.mat"]


def test_one_image_is_a_set_too(tmp_path):
    """scipy drops trailing dimensions of length 1."""
    write(tmp_path / "x.mat", [4])
    images, labels = read_svhn(tmp_path / "x.mat")
    assert images.shape == (1, 3, 32, 32) and labels.tolist() == [4]


def test_faults_are_named(tmp_path):
    path = tmp_path / "test_32x32.mat"
    with pytest.raises(DataError, match="test_32x32.mat is missing"):
        read_svhn(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="test_32x32.mat is not an SVHN file"):
        read_svhn(path)
    savemat(path, {"X": np.zeros((32, 32, 3, 2), np.uint8)})
    with pytest.raises(DataError, match="not an SVHN file"):
        read_svhn(path)
    write(path, [1, 2], dtype=np.float64)
    with pytest.raises(DataError, match=r"X is float64 .*not uint8 \[32, 32, 3, N\]"):
        read_svhn(path)
    write(path, [0, 2])
    with pytest.raises(DataError, match="labels run from 0 to 2, not 1 to 10"):
        read_svhn(path)


def test_both_halves_are_loaded(tmp_path):
    for split, labels in (("train", [10, 3]), ("test", [1])):
        write(tmp_path / f"{split}_32x32.mat", labels)
    dataset = SVHN.load(tmp_path, READING)
    assert dataset.train.labels.tolist() == [0, 3] and dataset.test.labels.tolist() == [1]
    assert dataset.classes == [str(i) for i in range(10)]
