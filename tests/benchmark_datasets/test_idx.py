"""idx files, plain and gzipped, whole and cut."""

import gzip

import numpy as np
import pytest
import torch

from expect import expect_error
from protosteer.data.datasets.idx import as_small_images, idx_files, read_idx, read_images
from protosteer.errors import DataError
from set_toys import idx_bytes


@pytest.fixture
def letters(tmp_path):
    """Images of 28 x 28 and their labels, the first pair plain, the second gzipped."""
    pixels = np.random.default_rng(0).integers(1, 256, (6, 28, 28), dtype=np.uint8)
    labels = np.array([3, 0, 9, 1, 1, 5], dtype=np.uint8)
    for name, array in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", labels)):
        (tmp_path / f"train-{name}").write_bytes(idx_bytes(array))
        (tmp_path / f"t10k-{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
    return tmp_path, pixels, labels


def test_plain_and_gzipped_files_are_found_and_alike(letters):
    folder, pixels, labels = letters
    paths = idx_files(folder) or []
    assert [path.suffix for path in paths] == ["", "", ".gz", ".gz"]
    for pair in (paths[:2], paths[2:]):
        images, numbers = read_images(*pair)
        assert images.shape == (6, 3, 32, 32) and images.dtype == torch.uint8
        assert (images[:, 1, 2:30, 2:30].numpy() == pixels).all()
        assert numbers.tolist() == labels.tolist() and numbers.dtype == torch.int64
    paths[0].unlink()
    assert idx_files(folder) is None and idx_files(folder, ("t10k",)) == paths[2:]


def test_the_edge_is_black_and_three_channels_cost_no_more_than_one():
    images = as_small_images(torch.full((5, 28, 28), 7, dtype=torch.uint8))
    assert images.sum() == 7 * 28 * 28 * 3 * 5 and images[:, :, :2].sum() == 0 and images[..., -2:].sum() == 0
    assert images.untyped_storage().nbytes() == 5 * 32 * 32


@pytest.mark.parametrize(
    "change",
    [
        *(lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:9], lambda data: b""),
        *(lambda data: b"\0\0\x09" + data[3:], lambda data: b"\0\0\x08\x01" + data[4:]),
    ],
)
def test_damage_is_told_in_one_line(letters, change):
    path = letters[0] / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with expect_error("damaged-file", DataError) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_gzip_file_that_ends_early_is_named(letters):
    path = letters[0] / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with expect_error("damaged-file", DataError):
        read_idx(path, 3)
    path.write_bytes(b"no gzip")
    with expect_error("damaged-file", DataError):
        read_idx(path, 3)


def test_every_image_has_a_label(letters):
    folder, _, labels = letters
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels[:4]))
    with expect_error("label-count", DataError):
        read_images(*(idx_files(folder) or [])[:2])
