"""The data sets that streams are made of: where they come from, what they must look like, how they are read.

A data set is looked for in DATA/NAME, in DATA/<its official folder> and in DATA itself. What has an official
checksum must match it; the checksums of everything that was read go into `Dataset.checksums`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from protosteer.data.datasets import Dataset, Labelled
from protosteer.data.downloads import Remote, fetch, to_stderr, unpack
from protosteer.data.folders import (
    Files,
    name_classes,
    read_folder,
    read_grey,
    read_list,
    readable,
    stratified_split,
    tree_checksum,
    without,
)
from protosteer.data.images import ArrayImages, FileImages
from protosteer.data.sets.cifar import cifar_files, read_cifar10, read_cifar100
from protosteer.data.sets.idx import as_small_images, content, idx_files, read_images
from protosteer.data.sets.svhn import read_svhn, svhn_files
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError
from protosteer.util.files import cache_dir
from protosteer.util.text import suggestion

Say = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """How the images of folders are to be read; arrays need none of it."""

    preprocessing: Preprocessing
    skip_unreadable: bool = False
    say: Say = lambda line: None


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a data set before any of its files is read.

    find: the files that make it up in a folder, a folder standing for all images in it, or None.
    load: reads them, checking form but not checksums.
    """

    name: str
    title: str
    classes: int
    licence: str
    source: str
    find: Callable[[Path], Sequence[Path] | None]
    load: Callable[[Path, Reading], Dataset]
    files: tuple[Remote, ...] = ()
    accepted: tuple[Remote, ...] = ()  # archives that do as well, if they have been put there
    folders: tuple[str, ...] = ()  # official folder names
    md5: Mapping[str, str] = field(default_factory=dict)  # official, by file name
    own_folder: bool = False  # its files are called like those of others, so the folder's name must tell
    shipped_with: str = ""  # a package that brings it along
    shipped_in: str = ""
    by_hand: str = ""  # what to put where, for a data set that nobody may pass on
    note: str = ""

    @property
    def size(self) -> int | None:
        """Bytes to download, where it is known."""
        sizes = [file.size for file in self.files]
        return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)

    def places(self, root: Path) -> list[Path]:
        """Folders where it may lie, the likeliest first."""
        if self.shipped_with:
            package = find_spec(self.shipped_with)
            return [Path(package.origin).parent / self.shipped_in] if package and package.origin else []
        own = root / self.name
        places = [
            own,
            *(own / folder for folder in self.folders),
            *(root / folder for folder in self.folders),
        ]
        names = {self.name, *(folder.split("/")[0] for folder in self.folders)}
        if not self.own_folder or root.name in names:
            places += [root, *(root / folder.partition("/")[2] for folder in self.folders if "/" in folder)]
        return places

    def locate(self, root: Path) -> Path | None:
        """The folder that holds all its files, if there is one."""
        return next((place for place in self.places(root) if self.find(place) is not None), None)


@dataclass(frozen=True)
class DatasetStatus:
    info: DatasetInfo
    path: Path | None  # where its files are, if they are


def data_root(data_dir: Path | None = None) -> Path:
    """The folder for data: the one given, else PROTOSTEER_DATA, else protosteer's cache."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    named = os.environ.get("PROTOSTEER_DATA")
    return Path(named).expanduser() if named else cache_dir() / "data"


def find_dataset(name: str) -> DatasetInfo:
    if name in DATASETS:
        return DATASETS[name]
    near = suggestion(name.lower().replace("_", "-"), DATASETS)
    raise DataError(f"no data set is called '{name}'; {near}")


def list_datasets(data_dir: Path | None = None) -> list[DatasetStatus]:
    """Every data set with the place where it was found; checksums are not looked at."""
    root = data_root(data_dir)
    return [DatasetStatus(info, info.locate(root)) for info in DATASETS.values()]


def open_dataset(
    name: str,
    data_dir: Path | None,
    preprocessing: Preprocessing,
    skip_unreadable: bool = False,
    download: bool = True,
    on_message: Say | None = None,
) -> Dataset:
    """Find, download where it is absent, verify and read a data set.

    skip_unreadable: leave images out that cannot be decoded, and name them; otherwise one stops the reading.
    on_message: takes lines about downloads and skipped files; without it they go to standard error.
    """
    info = find_dataset(name)
    folder, checksums = get_dataset(info, data_root(data_dir), download, on_message)
    dataset = info.load(folder, Reading(preprocessing, skip_unreadable, on_message or to_stderr))
    if len(dataset.classes) != info.classes:
        raise DataError(f"{folder} holds {len(dataset.classes)} classes; {info.title} has {info.classes}")
    return replace(dataset, checksums={**dataset.checksums, **checksums})


def get_dataset(
    info: DatasetInfo, root: Path, download: bool = True, on_message: Say | None = None
) -> tuple[Path, dict[str, str]]:
    """The folder of a data set and the verified checksums of its files, downloaded where they are absent."""
    folder = info.locate(root)
    if folder is None:
        _obtain(info, root, download, on_message)
        folder = info.locate(root)
    if folder is None:
        raise DataError(
            f"{info.title} was fetched into {root / info.name}, but files are missing; remove that folder"
        )
    return folder, verify(info, folder)


def verify(info: DatasetInfo, folder: Path) -> dict[str, str]:
    """The checksum of every file by name: md5 where it is official, else sha256; images have one in common."""
    found = info.find(folder) or []
    return {path.name: _verified(path, info) for path in found if path.is_file()}


def _verified(path: Path, info: DatasetInfo) -> str:
    official = info.md5.get(path.name)
    if official is None:
        return f"sha256:{_digest(path, 'sha256')}"
    found = _digest(path, "md5")
    if found == official:
        return f"md5:{found}"
    plain = info.md5.get(path.stem) if path.suffix == ".gz" else None
    if plain and hashlib.md5(content(path), usedforsecurity=False).hexdigest() == plain:
        return f"md5:{plain}"  # the official content, gzipped anew
    raise DataError(
        f"{path} has md5 {found}, but the official file has {official}; "
        f"remove it and run: protosteer datasets get {info.name}"
    )


def _digest(path: Path, algorithm: str) -> str:
    state = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


# Getting what is absent


def _obtain(info: DatasetInfo, root: Path, download: bool, on_message: Say | None) -> None:
    """Download and unpack; archives that the user has put there are used, and left where they are."""
    target = root / info.name
    if not info.files:
        raise DataError(f"{info.title} is not in {root} and cannot be downloaded: {_by_hand(info, target)}")
    for remote in info.accepted:
        if (archive := _given(remote, target, root)) and remote.folder:
            unpack(archive, remote.folder, target)
            return
    for remote in info.files:
        if remote.folder and (target / remote.folder).exists():
            raise DataError(f"{target / remote.folder} is there but lacks files; remove it and try again")
        archive = _given(remote, target, root)
        given = archive is not None
        if archive is None and not download:
            raise DataError(f"{info.title} is not in {root}: {_by_hand(info, target)}")
        if archive is None:
            archive = _fetched(info, remote, target, on_message)
        if remote.folder:
            unpack(archive, remote.folder, target)
            if not given:
                archive.unlink()


def _given(remote: Remote, target: Path, root: Path) -> Path | None:
    """The file, if the user has put it there; an archive may also lie beside the folder, but must be official."""
    places = [target, root] if remote.folder else [target]
    path = next((place / remote.name for place in places if (place / remote.name).is_file()), None)
    if path and remote.folder and remote.md5 and (found := _digest(path, "md5")) != remote.md5:
        raise DataError(f"{path} has md5 {found}, but the official file has {remote.md5}; remove it")
    return path


def _fetched(info: DatasetInfo, remote: Remote, target: Path, on_message: Say | None) -> Path:
    try:
        return fetch(remote, target, on_message)
    except DataError as error:
        raise DataError(f"{error}; without a network {_by_hand(info, target)}") from error


def _by_hand(info: DatasetInfo, target: Path) -> str:
    if info.by_hand:
        return info.by_hand.format(folder=target)
    files = ", ".join(file.describe() for file in info.files)
    pages = dict.fromkeys(file.urls[0].rpartition("/")[0] for file in info.files)
    return f"put {files} from {', '.join(pages)} into {target}"


# Loaders: a folder that has been found -> a data set; the checksums of single files are added by open_dataset


def _arrays(
    name: str, classes: Sequence[str], train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> Dataset:
    first, second = (Labelled(ArrayImages(pixels), labels) for pixels, labels in (train, test))
    return Dataset(name, list(classes), first, second)


def _lazy(
    name: str, classes: Sequence[str], train: Files, test: Files, folder: Path, reading: Reading
) -> Dataset:
    """Image files, decoded when asked for."""
    checksum = tree_checksum([*train.paths, *test.paths], folder)
    parts = []
    for files in (train, test):
        kept = _readable(files, reading) if reading.skip_unreadable else files
        parts.append(Labelled(FileImages(kept.paths, reading.preprocessing), kept.numbers(classes)))
    return Dataset(name, list(classes), parts[0], parts[1], {"images": checksum})


def _readable(files: Files, reading: Reading) -> Files:
    bad = readable(files.paths)[1]
    if bad:
        reading.say(f"{len(bad)} unreadable images are left out: {', '.join(str(path) for path in bad)}")
    return without(files, bad)


def _load_cifar10(folder: Path, reading: Reading) -> Dataset:
    pixels, labels, names = read_cifar10(folder, "train")
    return _arrays("cifar10", names, (pixels, labels), read_cifar10(folder, "test")[:2])


def _load_cifar100(folder: Path, reading: Reading) -> Dataset:
    pixels, labels, names = read_cifar100(folder, "train")
    return _arrays("cifar100", names, (pixels, labels), read_cifar100(folder, "test")[:2])


def _load_idx(name: str, classes: Sequence[str], folder: Path) -> Dataset:
    train_images, train_labels, test_images, test_labels = idx_files(folder) or _gone(folder)
    train, test = read_images(train_images, train_labels), read_images(test_images, test_labels)
    return _arrays(name, classes, train, test)


def _gone(folder: Path) -> NoReturn:
    raise DataError(f"{folder} does not hold all files any more; look what became of them")


def _load_svhn(folder: Path, reading: Reading) -> Dataset:
    train, test = svhn_files(folder) or _gone(folder)
    return _arrays("svhn", DIGITS, read_svhn(train), read_svhn(test))


def _load_digits(folder: Path, reading: Reading) -> Dataset:
    """1,797 images of 8 x 8 pixels, half to train and half to test; ink runs from 0 to 16 in the source."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    return _arrays("digits", DIGITS, *_split(pixels.unsqueeze(1), labels, 0.5))


def _split(
    grey: Tensor, labels: Tensor, test_share: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images of [N, 1 or 3 equal channels, h, w]; the three channels share their memory."""
    names = [str(label) for label in labels.tolist()]
    train, test = (
        (grey[:, :1][rows].expand(-1, 3, -1, -1), labels[rows])
        for rows in stratified_split(names, test_share)
    )
    return train, test


# notMNIST


# Empty files in the official archives, which everybody leaves out.
NOTMNIST_BROKEN = (
    "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png",
    "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png",
)
NOTMNIST_TEST_SHARE = 0.1


def _find_notmnist(folder: Path) -> Sequence[Path] | None:
    halves = idx_files(folder) or idx_files(folder, ("t10k",)) or idx_files(folder, ("train",))
    if halves:
        return halves
    if (folder / "Train" / "A").is_dir() and (folder / "Test" / "A").is_dir():
        return [folder / "Train", folder / "Test"]
    return [folder] if all((folder / letter).is_dir() for letter in LETTERS) else None


def _load_notmnist(folder: Path, reading: Reading) -> Dataset:
    """Read at once: the letters are as small as MNIST's digits, and are to be seen like them."""
    found = _find_notmnist(folder) or _gone(folder)
    if len(found) == 4:
        return _load_idx("notmnist", LETTERS, folder)
    if found[0].is_file():
        pixels, labels = read_images(*found)
        checksums = {}
    else:
        parts = [_letters(path, reading) for path in found]
        checksums = {"images": tree_checksum([path for files in parts for path in files.paths], folder)}
        loaded = [(as_small_images(read_grey(files)), files.numbers(LETTERS)) for files in parts]
        if len(loaded) == 2:
            return replace(_arrays("notmnist", LETTERS, *loaded), checksums=checksums)
        pixels, labels = loaded[0]
    train, test = _split(pixels, labels, NOTMNIST_TEST_SHARE)
    return replace(_arrays("notmnist", LETTERS, train, test), checksums=checksums)


def _letters(folder: Path, reading: Reading) -> Files:
    files = read_folder(folder)
    files = without(files, [path for path in files.paths if path.name in NOTMNIST_BROKEN])
    return _readable(files, reading) if reading.skip_unreadable else files


# ImageNet's relatives and birds


IMAGENET_R_TEST_SHARE = 0.2


def _find_imagenet_r(folder: Path) -> Sequence[Path] | None:
    if not folder.is_dir() or not any(_is_wnid(entry) for entry in folder.iterdir()):
        return None
    return [folder, *(_lists(folder, "train.txt", "test.txt") or ())]


def _is_wnid(entry: Path) -> bool:
    """A folder called as WordNet numbers its nouns: n01443537."""
    return entry.name[:1] == "n" and entry.name[1:].isdecimal() and len(entry.name) == 9 and entry.is_dir()


def _lists(folder: Path, *names: str) -> list[Path] | None:
    paths = [folder / name for name in names]
    return paths if all(path.is_file() for path in paths) else None


def _load_imagenet_r(folder: Path, reading: Reading) -> Dataset:
    """Split by train.txt and test.txt if both are there, else 80 to 20 in every class by a fixed seed."""
    lists = _lists(folder, "train.txt", "test.txt")
    if lists:
        classes, (train, test) = name_classes(*(read_list(path) for path in lists))
    else:
        files = read_folder(folder)
        classes = sorted(set(files.labels))
        train, test = (files.rows(rows) for rows in stratified_split(files.labels, IMAGENET_R_TEST_SHARE))
    return _lazy("imagenet-r", classes, train, test, folder, reading)


SUBSET_LISTS = ("train_100.txt", "val_100.txt")


def _find_subset(folder: Path) -> Sequence[Path] | None:
    lists = _lists(folder, *SUBSET_LISTS)
    if lists:
        return lists
    halves = [folder / "train", folder / "val"]
    wanted = _lists(folder, "classes.txt")
    return [*wanted, *halves] if wanted and all(half.is_dir() for half in halves) else None


def _load_subset(folder: Path, reading: Reading) -> Dataset:
    lists = _lists(folder, *SUBSET_LISTS)
    if lists:
        classes, (train, test) = name_classes(*(read_list(path) for path in lists))
    else:
        lines = (folder / "classes.txt").read_text(encoding="utf-8").splitlines()
        classes = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
        train, test = (read_folder(folder / half, classes) for half in ("train", "val"))
    return _lazy("imagenet-subset", classes, train, test, folder, reading)


CUB_TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")


def _find_cub(folder: Path) -> Sequence[Path] | None:
    tables = _lists(folder, *CUB_TABLES)
    return [*tables, folder / "images"] if tables and (folder / "images").is_dir() else None


def _load_cub(folder: Path, reading: Reading) -> Dataset:
    """The official split: 5,994 birds to train, 5,794 to test."""
    images, labels, split, names = (_cub_table(folder / name) for name in CUB_TABLES)
    strange = next((number for number in images if number not in labels or number not in split), None)
    if strange is not None or not set(labels.values()) <= set(names):
        raise DataError(f"{folder}: the tables of CUB-200-2011 do not fit together; unpack them again")
    rows: dict[str, list[str]] = {"1": [], "0": []}
    for number in images:
        rows.setdefault(split[number], []).append(number)
    train, test = (
        Files([folder / "images" / images[i] for i in rows[part]], [names[labels[i]] for i in rows[part]])
        for part in ("1", "0")
    )
    return _lazy("cub200", list(names.values()), train, test, folder, reading)


def _cub_table(path: Path) -> dict[str, str]:
    """Lines of a number and a value."""
    table: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split(maxsplit=1)
        if len(words) == 1:
            raise DataError(f"{path}, line {number}: {line!r} is not a number and a value; unpack it again")
        if words:
            table[words[0]] = words[1].strip()
    return table


# The records


DIGITS = tuple(str(digit) for digit in range(10))
LETTERS = tuple("ABCDEFGHIJ")
CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR_PAGES = ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz")
MNIST_PAGES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "http://yann.lecun.com/exdb/mnist",
)
FASHION_PAGES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
)


def _remote(
    pages: Sequence[str], name: str, size: int | None, md5: str | None = None, folder: str | None = None
) -> Remote:
    return Remote(name, size, tuple(f"{page}/{name}" for page in pages), md5, folder)


def _md5(files: Sequence[Remote]) -> dict[str, str]:
    return {file.name: file.md5 for file in files if file.md5}


CIFAR100 = DatasetInfo(
    name="cifar100",
    title="CIFAR-100",
    classes=100,
    licence="none stated",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    find=lambda folder: cifar_files(folder, 100),
    load=_load_cifar100,
    files=(
        _remote(
            CIFAR_PAGES, "cifar-100-python.tar.gz", 169_001_437,
            "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python",
        ),
    ),
    accepted=(
        _remote(
            CIFAR_PAGES, "cifar-100-binary.tar.gz", 168_513_733,
            "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary",
        ),
    ),
    folders=("cifar-100-python", "cifar-100-binary"),
    md5={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
        "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
        "test.bin": "4499cfba6c016c1be1438163640a0898",
    },
)  # fmt: skip

CIFAR10 = DatasetInfo(
    name="cifar10",
    title="CIFAR-10",
    classes=10,
    licence="none stated",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    find=lambda folder: cifar_files(folder, 10),
    load=_load_cifar10,
    files=(
        _remote(
            CIFAR_PAGES, "cifar-10-python.tar.gz", 170_498_071,
            "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py",
        ),
    ),
    accepted=(
        _remote(
            CIFAR_PAGES, "cifar-10-binary.tar.gz", 170_052_171,
            "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin",
        ),
    ),
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
)  # fmt: skip

_MNIST_FILES = (
    _remote(MNIST_PAGES, "train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    _remote(MNIST_PAGES, "train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
    _remote(MNIST_PAGES, "t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
    _remote(MNIST_PAGES, "t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
)
MNIST = DatasetInfo(
    name="mnist",
    title="MNIST",
    classes=10,
    licence="CC BY-SA 3.0",
    source="http://yann.lecun.com/exdb/mnist/",
    find=idx_files,
    load=lambda folder, reading: _load_idx("mnist", DIGITS, folder),
    files=_MNIST_FILES,
    folders=("MNIST/raw", "MNIST"),
    md5={
        **_md5(_MNIST_FILES),
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    own_folder=True,
)

_FASHION_FILES = (
    _remote(FASHION_PAGES, "train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    _remote(FASHION_PAGES, "train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
    _remote(FASHION_PAGES, "t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
    _remote(FASHION_PAGES, "t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
)
FASHION_MNIST = DatasetInfo(
    name="fashion-mnist",
    title="Fashion-MNIST",
    classes=10,
    licence="MIT",
    source="https://github.com/zalandoresearch/fashion-mnist",
    find=idx_files,
    load=lambda folder, reading: _load_idx("fashion-mnist", CLOTHES, folder),
    files=_FASHION_FILES,
    folders=("FashionMNIST/raw", "FashionMNIST"),
    md5=_md5(_FASHION_FILES),
    own_folder=True,
)

_SVHN_PAGES = ("http://ufldl.stanford.edu/housenumbers",)
_SVHN_FILES = (
    _remote(_SVHN_PAGES, "train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
    _remote(_SVHN_PAGES, "test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
)
SVHN = DatasetInfo(
    name="svhn",
    title="SVHN, cropped digits",
    classes=10,
    licence="non-commercial",
    source="http://ufldl.stanford.edu/housenumbers/",
    find=svhn_files,
    load=_load_svhn,
    files=_SVHN_FILES,
    md5=_md5(_SVHN_FILES),
)

NOTMNIST = DatasetInfo(
    name="notmnist",
    title="notMNIST",
    classes=10,
    licence="none stated",
    source="http://yaroslavvb.com/upload/notMNIST/",
    find=_find_notmnist,
    load=_load_notmnist,
    files=(
        _remote(
            ("https://github.com/facebookresearch/Adversarial-Continual-Learning/raw/main/data",),
            "notMNIST.zip", None, None, "notMNIST",
        ),
    ),
    accepted=(
        _remote(
            ("http://yaroslavvb.com/upload/notMNIST",), "notMNIST_small.tar.gz", 8_458_043,
            "c9890a473a9769fda4bdf314aaf500dd", "notMNIST_small",
        ),
    ),
    folders=("notMNIST", "notMNIST_small"),
    own_folder=True,
    note="Nobody has published a split of notMNIST_small: one image in ten of every letter is a test image, "
    "drawn with a fixed seed. notMNIST.zip, which published runs of five-datasets use, has Train and Test.",
)  # fmt: skip

IMAGENET_R = DatasetInfo(
    name="imagenet-r",
    title="ImageNet-R",
    classes=200,
    licence="see source",
    source="https://github.com/hendrycks/imagenet-r",
    find=_find_imagenet_r,
    load=_load_imagenet_r,
    files=(
        _remote(
            ("https://people.eecs.berkeley.edu/~hendrycks",), "imagenet-r.tar", 2_191_079_936,
            "a61312130a589d0ca1a8fca1f2bd3337", "imagenet-r",
        ),
    ),
    own_folder=True,
    note="It was made as a test set, and the 24,000/6,000 splits of published runs differ. Lists train.txt and "
    "test.txt in its folder decide; without them 80 to 20 in every class, drawn with a fixed seed.",
)  # fmt: skip

CUB200 = DatasetInfo(
    name="cub200",
    title="CUB-200-2011",
    classes=200,
    licence="see source",
    source="https://www.vision.caltech.edu/datasets/cub_200_2011/",
    find=_find_cub,
    load=_load_cub,
    files=(
        _remote(
            ("https://data.caltech.edu/records/65de6-vp158/files",), "CUB_200_2011.tgz", 1_150_585_339,
            "97eceeb196236b17998738112f37df78", "CUB_200_2011",
        ),
    ),
    folders=("CUB_200_2011",),
)  # fmt: skip

IMAGENET_SUBSET = DatasetInfo(
    name="imagenet-subset",
    title="ImageNet-Subset",
    classes=100,
    licence="non-commercial",
    source="https://www.image-net.org/download.php",
    find=_find_subset,
    load=_load_subset,
    folders=("imagenet100", "imagenet-100", "imagenet"),
    by_hand="get ILSVRC2012 from https://www.image-net.org/download.php and put train/WNID/*.JPEG and "
    "val/WNID/*.JPEG into {folder}, with train_100.txt and val_100.txt (lines: path number) or a classes.txt "
    "of 100 WNIDs",
    note="Which 100 classes is for the list to say; most published runs use train_100.txt and val_100.txt "
    "of the PODNet and DER code.",
)

DIGITS_SET = DatasetInfo(
    name="digits",
    title="Optical digits of scikit-learn",
    classes=10,
    licence="CC BY 4.0",
    source="https://archive.ics.uci.edu/dataset/80",
    find=lambda folder: _lists(folder, "digits.csv.gz") or [],
    load=_load_digits,
    shipped_with="sklearn",
    shipped_in="datasets/data",
    note="Half of the images of every digit are test images, drawn with a fixed seed.",
)

DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        CIFAR100, CIFAR10, MNIST, FASHION_MNIST, SVHN, NOTMNIST, IMAGENET_R, CUB200, IMAGENET_SUBSET, DIGITS_SET,
    )
}  # fmt: skip
