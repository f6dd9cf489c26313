"""MNIST and Fashion-MNIST: files of the same names, told apart by their folders."""

import gzip
import hashlib
from dataclasses import replace

import pytest

from expect import expect_error
from protosteer.data.datasets import prepare
from protosteer.data.datasets.mnist import FASHION_MNIST, MNIST
from protosteer.data.datasets.registry import list_datasets, open_dataset
from protosteer.errors import DataError
from set_toys import READING, write_idx


def test_the_real_mnist_passes_its_checksums(shared):
    """These files were gzipped anew: their content is official, their gzip checksums are not."""
    if not (shared / "data" / "mnist").is_dir():
        pytest.skip(f"no MNIST: {shared / 'data' / 'mnist'} does not exist")
    for root in (shared / "data", shared / "data" / "mnist"):
        dataset = open_dataset("mnist", root, READING)
        assert dataset.checksums == {
            "train-images-idx3-ubyte.gz": "md5:6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte.gz": "md5:a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte.gz": "md5:2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte.gz": "md5:27ae3e4e09519cfbb04c329615203637",
        }
    assert dataset.train.labels[:5].tolist() == [5, 0, 4, 1, 9] and len(dataset.test.images) == 10000
    assert dataset.train.images.pixels([0, 7]).shape == (2, 3, 32, 32)
    assert dataset.train.images.array.untyped_storage().nbytes() == 60000 * 32 * 32  # type: ignore[attr-defined]


def test_official_content_gzipped_anew_is_accepted(tmp_path):
    write_idx(tmp_path / "mnist")
    zipped = sorted((tmp_path / "mnist").glob("*.gz"))
    sums = {path.name: "0" * 32 for path in zipped}
    sums |= {path.stem: hashlib.md5(gzip.decompress(path.read_bytes())).hexdigest() for path in zipped}
    checksums = prepare.verify(replace(MNIST, md5=sums), tmp_path / "mnist")
    assert [checksums[path.name] for path in zipped] == [f"md5:{sums[path.stem]}" for path in zipped]


def test_sets_with_the_same_file_names_are_told_apart_by_their_folders(tmp_path):
    write_idx(tmp_path / "FashionMNIST" / "raw")
    write_idx(tmp_path)
    status = {row.info.name: row.path for row in list_datasets(tmp_path)}
    assert status["fashion-mnist"] == tmp_path / "FashionMNIST" / "raw"
    assert status["mnist"] is None and status["notmnist"] is None
    inside = {row.info.name: row.path for row in list_datasets(tmp_path / "FashionMNIST")}
    assert inside["fashion-mnist"] == tmp_path / "FashionMNIST" / "raw" and inside["mnist"] is None


def test_another_content_is_refused_gzipped_or_not(tmp_path):
    write_idx(tmp_path / "mnist")
    with expect_error("checksum", DataError):
        open_dataset("mnist", tmp_path, READING)
    plain = tmp_path / "mnist" / "train-images-idx3-ubyte"
    plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    with expect_error("checksum", DataError):
        open_dataset("mnist", tmp_path, READING)


def test_fashion_mnist(tmp_path):
    pixels = write_idx(tmp_path)
    dataset = FASHION_MNIST.load(tmp_path, READING)
    assert dataset.classes[0] == "T-shirt/top" and dataset.classes[9] == "Ankle boot"
    assert (dataset.train.images.pixels([3])[0, 2, 2:30, 2:30].numpy() == pixels[3]).all()
