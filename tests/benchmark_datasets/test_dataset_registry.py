"""Data sets are found, verified and fetched; how each is read is tested beside it."""

import hashlib
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from expect import expect_error
from protosteer.data.datasets import prepare
from protosteer.data.datasets.registry import (
    BENCHMARKS,
    DATASETS,
    data_root,
    find_dataset,
    get_dataset,
    list_datasets,
    open_dataset,
)
from protosteer.data.downloads import Remote
from protosteer.errors import DataError
from set_toys import READING, write_cifar100


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(remote, folder, say):
        raise DataError(f"{remote.name} could not be fetched: no network")

    monkeypatch.setattr(prepare, "fetch", refuse)


def test_names_and_suggestions():
    assert find_dataset("cifar100").classes == 100
    with expect_error("unknown-dataset", DataError):
        find_dataset("CIFAR_10")
    with expect_error("unknown-dataset", DataError):
        find_dataset("xyz")


def test_records_are_complete():
    for name, info in DATASETS.items():
        assert name == info.name and info.title and info.licence and info.source.startswith("http")
        assert 9 <= info.classes <= 300
        assert info.files or info.by_hand or info.shipped_with
        for remote in (*info.files, *info.accepted):
            assert remote.urls and all(url.endswith(f"/{remote.name}") for url in remote.urls)
            unpacked = Path("data", name, remote.folder or "")
            assert unpacked in info.folders_below(Path("data")), "it would not be found where it is put"
        sums = [value for value in info.official.values() if value]
        assert all(len(value) == 32 and set(value) <= set("0123456789abcdef") for value in sums)


def test_benchmarks_are_made_of_known_sets():
    for name, row in BENCHMARKS.items():
        assert name == row.name and row.title and row.datasets and set(row.datasets) <= set(DATASETS)
        assert row.tasks == len(row.datasets) if row.domains else row.tasks in (3, 5, 10)


def test_where_data_lives(monkeypatch, tmp_path):
    monkeypatch.delenv("PROTOSTEER_DATA", raising=False)
    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "data"
    monkeypatch.setenv("PROTOSTEER_DATA", str(tmp_path / "env"))
    assert data_root(None) == tmp_path / "env" and data_root(tmp_path) == tmp_path


def tiny_cifar100(folder, **changes):
    """The record with the checksums of the small files instead of the official ones."""
    sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in ("train", "test", "meta")}
    return replace(find_dataset("cifar100"), md5=sums, **changes)


@pytest.mark.parametrize("place", ["cifar100", "cifar-100-python", "cifar100/cifar-100-python", "."])
def test_files_are_found_in_every_usual_place(tmp_path, place, monkeypatch):
    folder = write_cifar100(tmp_path / place)
    monkeypatch.setitem(DATASETS, "cifar100", tiny_cifar100(folder))
    dataset = open_dataset("cifar100", tmp_path, READING)
    assert dataset.name == "cifar100" and len(dataset.train.images) == 10 and dataset.classes[99] == "class 99"
    assert {name: value[:4] for name, value in dataset.checksums.items()} == dict.fromkeys(
        ("train", "test", "meta"), "md5:"
    )
    status = {row.info.name: row.path for row in list_datasets(tmp_path)}
    assert status["cifar100"] == folder and status["cifar10"] is None


def test_another_checksum_is_refused_in_one_line(tmp_path):
    folder = write_cifar100(tmp_path / "cifar100")
    with pytest.raises(DataError) as caught:
        open_dataset("cifar100", tmp_path, READING)
    found = hashlib.md5((folder / "train").read_bytes()).hexdigest()
    text = str(caught.value)
    assert f"{folder / 'train'} has md5 {found}" in text and "16019d7e3df5f24257cddd939b257f8d" in text
    assert "remove it and run: protosteer datasets get cifar100" in text and "\n" not in text


def test_absent_files_are_asked_for_by_name_size_and_folder(tmp_path):
    with expect_error("download-failed", DataError):
        open_dataset("cifar100", tmp_path, READING)


def archived(tmp_path):
    """(record, archive): small CIFAR-100 files in an archive like the official one."""
    folder = write_cifar100(tmp_path / "made" / "cifar-100-python")
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as bundle:
        bundle.add(folder, "cifar-100-python")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    remote = Remote(archive.name, archive.stat().st_size, ("http://x",), md5, "cifar-100-python")
    return tiny_cifar100(folder, files=(remote,), accepted=()), archive


def test_a_download_is_unpacked_verified_and_its_archive_removed(tmp_path, monkeypatch):
    info, archive = archived(tmp_path)
    monkeypatch.setitem(DATASETS, "cifar100", info)

    def fetch(remote, folder, say):
        say(f"fetching {remote.name}")
        folder.mkdir(parents=True)
        return archive.rename(folder / remote.name)

    monkeypatch.setattr(prepare, "fetch", fetch)
    said = []
    dataset = open_dataset("cifar100", tmp_path / "data", replace(READING, say=said.append))
    assert said == ["fetching cifar-100-python.tar.gz"] and len(dataset.test.images) == 10
    assert [path.name for path in (tmp_path / "data" / "cifar100").iterdir()] == ["cifar-100-python"]


@pytest.mark.parametrize("place", [".", "cifar100"])
@pytest.mark.parametrize("kind", ["files", "accepted"])
def test_an_archive_put_there_by_hand_is_used_and_left(tmp_path, place, kind):
    info, archive = archived(tmp_path)
    if kind == "accepted":
        info = replace(info, accepted=info.files, files=find_dataset("svhn").files)
    root = tmp_path / "data"
    (root / place).mkdir(parents=True)
    archive = archive.rename(root / place / archive.name)
    folder, checksums = get_dataset(info, root)
    assert folder == root / "cifar100" / "cifar-100-python" and len(checksums) == 3 and archive.exists()


def test_a_wrong_archive_is_refused(tmp_path):
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(b"half of it")
    with expect_error("checksum", DataError):
        open_dataset("cifar100", tmp_path, READING)


def test_a_folder_that_lacks_files_is_told_before_anything_is_fetched(tmp_path):
    folder = write_cifar100(tmp_path / "cifar100" / "cifar-100-python")
    (folder / "test").unlink()
    with expect_error("incomplete-folder", DataError):
        open_dataset("cifar100", tmp_path, READING)


def test_digits_are_always_there(tmp_path):
    dataset = open_dataset("digits", tmp_path / "absent", READING)
    assert len(dataset.train.images) == 898 and len(dataset.test.images) == 899
    assert dataset.checksums["digits.csv.gz"].startswith("sha256:")
    pixels = dataset.train.images.pixels([0, 1])
    assert pixels.shape == (2, 3, 8, 8) and pixels.max() == 255
    assert {row.info.name for row in list_datasets(tmp_path) if row.path} == {"digits", "details"}
