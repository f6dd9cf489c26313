"""SVHN's .mat files: layout, order, and the digit that is called 10."""

import numpy as np
import torch
from scipy.io import savemat

from expect import expect_error
from protosteer.data.datasets.svhn import SVHN, read_svhn
from protosteer.errors import DataError
from set_toys import READING


def write(path, labels):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, len(labels)), dtype=np.uint8)
    savemat(path, {"X": pixels, "y": np.array(labels, dtype=np.uint8)[:, None]})
    return pixels


def test_order_is_kept_and_ten_means_zero(tmp_path):
    pixels = write(tmp_path / "train_32x32.mat", [10, 1, 9, 2, 10])
    images, labels = read_svhn(tmp_path / "train_32x32.mat")
    assert labels.tolist() == [0, 1, 9, 2, 0] and labels.dtype == torch.int64
    assert images.shape == (5, 3, 32, 32) and images.dtype == torch.uint8 and images.is_contiguous()
    assert images[3, 2, 11, 30] == pixels[11, 30, 2, 3] and SVHN.find(tmp_path) is None
    write(tmp_path / "test_32x32.mat", [1])  # scipy drops trailing dimensions of length 1
    dataset = SVHN.load(tmp_path, READING)
    assert torch.equal(dataset.train.labels, labels) and dataset.test.labels.tolist() == [1]
    assert dataset.test.images.pixels([0]).shape == (1, 3, 32, 32)
    assert dataset.classes == [str(i) for i in range(10)]


def test_faults_are_named(tmp_path):
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(b"nothing of the kind")
    with expect_error("damaged-file", DataError):
        read_svhn(path)
    savemat(path, {"X": np.zeros((32, 32, 3, 2), np.uint8)})
    with expect_error("damaged-file", DataError):
        read_svhn(path)
