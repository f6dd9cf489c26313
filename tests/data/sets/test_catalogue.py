"""Data sets are found, verified, fetched and read; those not at hand from small files in the official form.

`info.load` reads without looking at checksums, which is how the small files get past them.
"""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from protosteer.data.downloads import Remote
from protosteer.data.sets import notmnist, obtaining
from protosteer.data.sets.catalogue import (
    DATASETS,
    Reading,
    data_root,
    find_dataset,
    get_dataset,
    list_datasets,
    open_dataset,
)
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

HALF = (0.5, 0.5, 0.5)
SMALL = Preprocessing(8, HALF, HALF)
READING = Reading(SMALL)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A test that forgets download=False must not wait for a real server."""

    def refuse(remote, folder, on_message=None):
        raise DataError(f"{remote.name} could not be fetched: no network")

    monkeypatch.setattr(obtaining, "fetch", refuse)


def save(path, colour=(255, 0, 0), mode="RGB", size=(12, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def colours(images):
    return [tuple(pixels[:, 0, 0].tolist()) for pixels in images.pixels(range(len(images)))]


# Records


def test_names_and_suggestions():
    assert find_dataset("cifar100").classes == 100
    with pytest.raises(DataError, match="'CIFAR_10'; did you mean 'cifar10"):
        find_dataset("CIFAR_10")
    with pytest.raises(DataError, match="'xyz'; there are: cifar100, cifar10, mnist"):
        find_dataset("xyz")


def test_records_are_complete():
    for name, info in DATASETS.items():
        assert name == info.name and info.title and info.licence and info.source.startswith("http")
        assert info.classes in (10, 100, 200)
        assert info.files or info.by_hand or info.shipped_with
        for remote in (*info.files, *info.accepted):
            assert remote.urls and all(url.endswith(f"/{remote.name}") for url in remote.urls)
            assert remote.folder or info.md5[remote.name] == remote.md5
            assert not remote.folder or remote.folder in (*info.folders, info.name)
        sums = [*info.md5.values(), *(remote.md5 for remote in info.files if remote.md5)]
        assert all(len(value) == 32 and set(value) <= set("0123456789abcdef") for value in sums)


def test_where_data_lives(monkeypatch, tmp_path):
    monkeypatch.delenv("PROTOSTEER_DATA", raising=False)
    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "data"
    monkeypatch.setenv("PROTOSTEER_DATA", str(tmp_path / "env"))
    assert data_root(None) == tmp_path / "env"
    assert data_root(tmp_path) == tmp_path


# CIFAR: places, checksums, archives


def write_cifar100(folder, images=5):
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.random.default_rng(0).integers(0, 256, (images, 3072), dtype=np.uint8)
    for split in ("train", "test"):
        table = {"data": rows, "fine_labels": list(range(images))}
        (folder / split).write_bytes(pickle.dumps(table, protocol=2))
    (folder / "meta").write_bytes(
        pickle.dumps({"fine_label_names": [f"class {i}" for i in range(100)]}, protocol=2)
    )
    return folder


def tiny_cifar100(folder, **changes):
    """The record with the checksums of the small files instead of the official ones."""
    sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in ("train", "test", "meta")}
    return replace(find_dataset("cifar100"), md5=sums, **changes)


@pytest.mark.parametrize("place", ["cifar100", "cifar-100-python", "cifar100/cifar-100-python", "."])
def test_files_are_found_in_every_usual_place(tmp_path, place, monkeypatch):
    folder = write_cifar100(tmp_path / place)
    monkeypatch.setitem(DATASETS, "cifar100", tiny_cifar100(folder))
    dataset = open_dataset("cifar100", tmp_path, SMALL, download=False)
    assert dataset.name == "cifar100" and len(dataset.train.images) == 5 and dataset.classes[99] == "class 99"
    assert {name: value[:4] for name, value in dataset.checksums.items()} == dict.fromkeys(
        ("train", "test", "meta"), "md5:"
    )
    status = {row.info.name: row.path for row in list_datasets(tmp_path)}
    assert status["cifar100"] == folder and status["cifar10"] is None


def test_another_checksum_is_refused_in_one_line(tmp_path):
    folder = write_cifar100(tmp_path / "cifar100")
    with pytest.raises(DataError) as caught:
        open_dataset("cifar100", tmp_path, SMALL)
    found = hashlib.md5((folder / "train").read_bytes()).hexdigest()
    text = str(caught.value)
    assert f"{folder / 'train'} has md5 {found}" in text and "16019d7e3df5f24257cddd939b257f8d" in text
    assert "remove it and run: protosteer datasets get cifar100" in text and "\n" not in text


def test_absent_files_are_asked_for_by_name_size_and_folder(tmp_path):
    expected = r"put cifar-100-python.tar.gz \(169,001,437 bytes\) from https://www.cs.toronto.edu/~kriz into .*/cifar100$"
    with pytest.raises(DataError, match=f"CIFAR-100 is not in .*: {expected}"):
        open_dataset("cifar100", tmp_path, SMALL, download=False)
    with pytest.raises(DataError, match=f"could not be fetched.*without a network {expected}"):
        open_dataset("cifar100", tmp_path, SMALL)
    with pytest.raises(
        DataError, match=r"put train_32x32.mat \(182,040,794 bytes\), test_32x32.mat \(64,275,384"
    ):
        open_dataset("svhn", tmp_path, SMALL, download=False)


def archived(tmp_path):
    """(record, archive): small CIFAR-100 files in an archive like the official one."""
    folder = write_cifar100(tmp_path / "made" / "cifar-100-python")
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as bundle:
        bundle.add(folder, "cifar-100-python")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    remote = Remote(archive.name, archive.stat().st_size, ("http://x/y",), md5, "cifar-100-python")
    return tiny_cifar100(folder, files=(remote,), accepted=()), archive


def test_a_download_is_unpacked_verified_and_its_archive_removed(tmp_path, monkeypatch):
    info, archive = archived(tmp_path)
    monkeypatch.setitem(DATASETS, "cifar100", info)

    def fetch(remote, folder, on_message=None):
        on_message(f"fetching {remote.name}")
        folder.mkdir(parents=True)
        return archive.rename(folder / remote.name)

    monkeypatch.setattr(obtaining, "fetch", fetch)
    said = []
    dataset = open_dataset("cifar100", tmp_path / "data", SMALL, on_message=said.append)
    assert said == ["fetching cifar-100-python.tar.gz"] and len(dataset.test.images) == 5
    assert [path.name for path in (tmp_path / "data" / "cifar100").iterdir()] == ["cifar-100-python"]


@pytest.mark.parametrize("place", [".", "cifar100"])
def test_an_archive_put_there_by_hand_is_used_and_left(tmp_path, place):
    info, archive = archived(tmp_path)
    root = tmp_path / "data"
    (root / place).mkdir(parents=True)
    archive = archive.rename(root / place / archive.name)
    folder, checksums = get_dataset(info, root, download=False)
    assert folder == root / "cifar100" / "cifar-100-python" and len(checksums) == 3 and archive.exists()


def test_another_official_archive_does_as_well(tmp_path):
    info, archive = archived(tmp_path)
    info = replace(info, accepted=info.files, files=find_dataset("cifar100").files)
    other = replace(info.accepted[0], name="other.tar.gz")
    info = replace(info, accepted=(other,))
    root = tmp_path / "data"
    root.mkdir()
    archive.rename(root / "other.tar.gz")
    assert get_dataset(info, root, download=False)[0] == root / "cifar100" / "cifar-100-python"


def test_a_wrong_archive_is_refused(tmp_path):
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(b"half of it")
    with pytest.raises(DataError, match="cifar-100-python.tar.gz has md5 .* official file has eb9058c3"):
        open_dataset("cifar100", tmp_path, SMALL)


def test_a_folder_that_lacks_files_is_told_before_anything_is_fetched(tmp_path):
    folder = write_cifar100(tmp_path / "cifar100" / "cifar-100-python")
    (folder / "test").unlink()
    with pytest.raises(DataError, match="cifar-100-python is there but lacks files; remove it"):
        open_dataset("cifar100", tmp_path, SMALL)


# idx


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, prefixes=("train", "t10k"), count=100):
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for prefix in prefixes:
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))
    return pixels


def test_the_real_mnist_passes_its_checksums(shared):
    """These files were gzipped anew: their content is official, their gzip checksums are not."""
    if not (shared / "data" / "mnist").is_dir():
        pytest.skip(f"no MNIST: {shared / 'data' / 'mnist'} does not exist")
    for root in (shared / "data", shared / "data" / "mnist"):
        dataset = open_dataset("mnist", root, SMALL, download=False)
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
    checksums = obtaining.verify(replace(find_dataset("mnist"), md5=sums), tmp_path / "mnist")
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
    with pytest.raises(DataError, match="train-images-idx3-ubyte has md5 .* has 6bbc9ace"):
        open_dataset("mnist", tmp_path, SMALL, download=False)
    plain = tmp_path / "mnist" / "train-images-idx3-ubyte"
    plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    with pytest.raises(DataError, match="train-images-idx3-ubyte.gz has md5 .* has f68b3c2d"):
        open_dataset("mnist", tmp_path, SMALL, download=False)


def test_fashion_mnist(tmp_path):
    pixels = write_idx(tmp_path)
    dataset = find_dataset("fashion-mnist").load(tmp_path, READING)
    assert dataset.classes[0] == "T-shirt/top" and dataset.classes[9] == "Ankle boot"
    assert (dataset.train.images.pixels([3])[0, 2, 2:30, 2:30].numpy() == pixels[3]).all()


# SVHN and digits


def test_svhn(tmp_path):
    for split, labels in (("train", [10, 3]), ("test", [1])):
        pixels = np.full((32, 32, 3, len(labels)), 9, np.uint8)
        savemat(tmp_path / f"{split}_32x32.mat", {"X": pixels, "y": np.array(labels, np.uint8)[:, None]})
    dataset = find_dataset("svhn").load(tmp_path, READING)
    assert dataset.train.labels.tolist() == [0, 3] and dataset.test.labels.tolist() == [1]
    assert dataset.classes == [str(i) for i in range(10)]


def test_digits_are_always_there(tmp_path):
    dataset = open_dataset("digits", tmp_path / "absent", SMALL, download=False)
    assert len(dataset.train.images) == 898 and len(dataset.test.images) == 899
    assert dataset.checksums["digits.csv.gz"].startswith("sha256:")
    pixels = dataset.train.images.pixels([0, 1])
    assert pixels.shape == (2, 3, 8, 8) and pixels.max() == 255
    assert {row.info.name for row in list_datasets(tmp_path) if row.path} == {"digits"}


# notMNIST


def write_letters(folder, per_letter):
    for place, letter in enumerate("ABCDEFGHIJ"):
        for i in range(per_letter):
            save(folder / letter / f"{i:02d}.png", place * 20 + i, "L", (28, 28))


def test_notmnist_of_the_five_datasets_has_train_and_test(tmp_path):
    write_letters(tmp_path / "notMNIST" / "Train", 3)
    write_letters(tmp_path / "notMNIST" / "Test", 2)
    (tmp_path / "notMNIST" / "Train" / "A" / notmnist.BROKEN[0]).write_bytes(b"")
    dataset = open_dataset("notmnist", tmp_path, SMALL, download=False)
    assert dataset.classes == list("ABCDEFGHIJ")
    assert dataset.train.labels.bincount().tolist() == [3] * 10
    assert dataset.test.labels.bincount().tolist() == [2] * 10
    pixels = dataset.train.images.pixels([4])[0]
    assert pixels.shape == (3, 32, 32) and (pixels[:, 2:30, 2:30] == 21).all() and pixels[:, :2].sum() == 0
    assert list(dataset.checksums) == ["images"] and dataset.checksums["images"].startswith("sha256:")


def test_notmnist_small_is_split_by_a_fixed_seed(tmp_path):
    write_letters(tmp_path / "notMNIST_small", 10)
    (tmp_path / "notMNIST_small" / "F" / notmnist.BROKEN[1]).write_bytes(b"")
    first, second = (open_dataset("notmnist", tmp_path, SMALL, download=False) for _ in range(2))
    assert first.train.labels.bincount().tolist() == [9] * 10
    assert first.test.labels.bincount().tolist() == [1] * 10
    rows = range(10)
    assert torch.equal(first.test.images.pixels(rows), second.test.images.pixels(rows))
    assert first.train.images.array.untyped_storage().nbytes() == 90 * 32 * 32  # type: ignore[attr-defined]


def test_a_broken_letter_stops_the_reading_or_is_left_out_on_request(tmp_path):
    write_letters(tmp_path / "notmnist", 10)
    bad = tmp_path / "notmnist" / "C" / "03.png"
    bad.write_bytes(b"")
    with pytest.raises(DataError, match="C/03.png cannot be read as an image"):
        open_dataset("notmnist", tmp_path, SMALL, download=False)
    said = []
    dataset = open_dataset("notmnist", tmp_path, SMALL, True, False, said.append)
    assert len(dataset.train.images) + len(dataset.test.images) == 99
    assert said == [f"1 unreadable images are left out: {bad}"]


@pytest.mark.parametrize("prefixes", [("train", "t10k"), ("t10k",)])
def test_notmnist_as_idx_files(tmp_path, prefixes):
    write_idx(tmp_path / "notmnist", prefixes)
    dataset = open_dataset("notmnist", tmp_path, SMALL, download=False)
    counts = (100, 100) if len(prefixes) == 2 else (90, 10)
    assert (len(dataset.train.images), len(dataset.test.images)) == counts
    assert len(dataset.checksums) == 2 * len(prefixes)
    assert all(value.startswith("sha256:") for value in dataset.checksums.values())


# ImageNet's relatives and birds


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
    assert (
        dataset.train.labels.bincount().tolist() == [8] * 3
        and dataset.test.labels.bincount().tolist() == [2] * 3
    )
    names = {dataset.test.images.name(row) for row in range(6)}
    assert names == {info.load(folder, READING).test.images.name(row) for row in range(6)}
    assert not names & {dataset.train.images.name(row) for row in range(24)}
    assert sorted(folder.rglob("*")) == before and list(dataset.checksums) == ["images"]
    with pytest.raises(DataError, match="holds 3 classes; ImageNet-R has 200"):
        open_dataset("imagenet-r", tmp_path, SMALL, download=False)


def test_imagenet_r_by_lists(tmp_path, monkeypatch):
    folder = write_imagenet_r(tmp_path / "imagenet-r", classes=2, per_class=3)
    (folder / "train.txt").write_text("n00000001/art_2.jpg 1\nn00000000/art_0.jpg 0\n")
    (folder / "test.txt").write_text("imagenet-r/n00000000/art_1.jpg 0\n")
    monkeypatch.setitem(DATASETS, "imagenet-r", replace(find_dataset("imagenet-r"), classes=2))
    dataset = open_dataset("imagenet-r", tmp_path, SMALL, download=False)
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
    with pytest.raises(DataError, match=r"n00000001/art_\d.jpg cannot be read as an image"):
        for part in (lazy.train, lazy.test):
            part.images.pixels(range(len(part.images)))


def write_cub(folder):
    names = ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    images = [f"{names[i % 2]}/bird_{i}.jpg" for i in range(6)]
    for i, name in enumerate(images):
        save(folder / "images" / name, (0, i * 40, 0))
    tables = {
        "images.txt": [f"{i + 1} {name}" for i, name in enumerate(images)],
        "image_class_labels.txt": [f"{i + 1} {i % 2 + 1}" for i in range(6)],
        "train_test_split.txt": [f"{i + 1} {int(i < 4)}" for i in range(6)],
        "classes.txt": [f"{i + 1} {name}" for i, name in enumerate(names)],
    }
    for name, lines in tables.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def test_cub_keeps_the_official_split(tmp_path):
    folder = write_cub(tmp_path / "CUB_200_2011")
    info = find_dataset("cub200")
    assert info.locate(tmp_path) == info.locate(folder) == folder
    dataset = info.load(folder, READING)
    assert dataset.classes == ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    assert dataset.train.labels.tolist() == [0, 1, 0, 1] and dataset.test.labels.tolist() == [0, 1]
    assert [round(green / 40) for _, green, _ in colours(dataset.test.images)] == [4, 5]


def test_cub_tables_that_do_not_fit(tmp_path):
    folder = write_cub(tmp_path)
    (folder / "images" / "002.Laysan_Albatross" / "bird_5.jpg").unlink()
    with pytest.raises(DataError, match="bird_5.jpg is missing"):
        find_dataset("cub200").load(folder, READING)
    (folder / "train_test_split.txt").write_text("1 1\n2 0\n")
    with pytest.raises(DataError, match="do not fit together"):
        find_dataset("cub200").load(folder, READING)
    (folder / "images.txt").write_text("1 a.jpg\n2\n")
    with pytest.raises(DataError, match="images.txt, line 2"):
        find_dataset("cub200").load(folder, READING)


def write_subset(folder):
    for half in ("train", "val"):
        for wnid in ("n01440764", "n01443537", "n09999999"):
            save(folder / half / wnid / f"{half}.JPEG")
    return folder


def test_imagenet_subset_by_lists(tmp_path):
    folder = write_subset(tmp_path / "imagenet100")
    for name, half in (("train_100.txt", "train"), ("val_100.txt", "val")):
        lines = [f"{half}/n01443537/{half}.JPEG 0", f"{half}/n01440764/{half}.JPEG 1"]
        (folder / name).write_text("\n".join(lines))
    assert find_dataset("imagenet-subset").locate(tmp_path) == folder
    dataset = find_dataset("imagenet-subset").load(folder, READING)
    assert dataset.classes == ["n01443537", "n01440764"] and dataset.train.labels.tolist() == [0, 1]


def test_imagenet_subset_by_a_list_of_classes(tmp_path):
    folder = write_subset(tmp_path)
    (folder / "classes.txt").write_text("# two\nn09999999\nn01440764 tench\n")
    dataset = find_dataset("imagenet-subset").load(folder, READING)
    assert dataset.classes == ["n09999999", "n01440764"]
    assert Counter(dataset.test.labels.tolist()) == {0: 1, 1: 1}
    assert dataset.train.images.name(0) == str(folder / "train" / "n09999999" / "train.JPEG")


def test_imagenet_subset_cannot_be_fetched(tmp_path):
    with pytest.raises(
        DataError, match="cannot be downloaded: get ILSVRC2012 .*into .*/imagenet-subset, with"
    ):
        open_dataset("imagenet-subset", tmp_path, SMALL)
