"""What a data set's file is made of: its record, its row as a benchmark, and what several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from protosteer.data.class_folders import Files, readable, stratified_split
from protosteer.data.downloads import Remote, Say, to_stderr
from protosteer.data.image_files import tree_checksum
from protosteer.data.images import ArrayImages, FileImages
from protosteer.data.labelled import Dataset, Labelled
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

NUMERALS = tuple("0123456789")


@dataclass(frozen=True)
class Reading:
    """How the images of folders are to be read; arrays need none of it.

    skip_unreadable: leave images out that cannot be decoded, and name them; otherwise one stops the reading.
    """

    preprocessing: Preprocessing
    skip_unreadable: bool = False
    say: Say = to_stderr


# Classes, training and test images, and a checksum where they were files of their own.
Contents = tuple[list[str], Labelled, Labelled, Mapping[str, str]]


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a data set before any of its files is read.

    find: the files that make it up in a folder, a folder standing for all images in it, or None.
    read: what these files hold, checking form but not checksums.
    """

    name: str
    title: str
    classes: int
    licence: str
    source: str
    find: Callable[[Path], Sequence[Path] | None]
    read: Callable[[Sequence[Path], Reading], Contents]
    files: tuple[Remote, ...] = ()
    accepted: tuple[Remote, ...] = ()  # archives that do as well, if they have been put there
    folders: tuple[str, ...] = ()  # official names, beside those in archives
    md5: Mapping[str, str] = field(default_factory=dict)  # official, beside those of `files`, by file name
    own_folder: bool = False  # its files are called like those of others, so the folder's name must tell
    shipped_with: str = ""  # a package that brings it along
    shipped_in: str = ""
    by_hand: str = ""  # what to put where, for a data set that nobody may pass on
    note: str = ""

    @property
    def size(self) -> int | None:
        """Bytes to download, where it is known."""
        sizes = [file.size or 0 for file in self.files]
        return sum(sizes) if sizes and all(sizes) else None

    @property
    def official(self) -> dict[str, str | None]:
        """Checksums by file name."""
        return {**{file.name: file.md5 for file in self.files}, **self.md5}

    def places(self, root: Path) -> list[Path]:
        """Folders where it may lie, the likeliest first."""
        if self.shipped_with:
            package = find_spec(self.shipped_with)
            return [Path(package.origin).parent / self.shipped_in] if package and package.origin else []
        archives = (*self.files, *self.accepted)
        folders = [*(archive.folder for archive in archives if archive.folder), *self.folders]
        own = root / self.name
        places = [own, *(place / folder for place in (own, root) for folder in folders)]
        if not self.own_folder or root.name in {self.name, *(folder.split("/")[0] for folder in folders)}:
            places += [root, *(root / folder.partition("/")[2] for folder in folders if "/" in folder)]
        return places

    def locate(self, root: Path) -> Path | None:
        """The folder that holds all its files, if there is one."""
        return next((place for place in self.places(root) if self.find(place) is not None), None)

    def load(self, folder: Path, reading: Reading) -> Dataset:
        found = self.find(folder)
        if found is None:
            raise DataError(
                f"{folder} does not hold all files any more; look what became of them",
                code="incomplete-folder",
                path=folder,
            )
        return Dataset(self.name, *self.read(found, reading))


@dataclass(frozen=True)
class Benchmark:
    """Classes to be learned task by task, with the number of tasks and the crop that the literature uses.

    crop: share of the resized image that the centre crop keeps, a part of the benchmark's definition; None
    leaves it to the weights. datasets: what it is made of, by name; several are joined in this order.
    """

    name: str
    title: str
    tasks: int
    crop: float | None
    datasets: tuple[str, ...] = ()


def all_of(folder: Path, *names: str) -> list[Path] | None:
    """The files of these names, or None where one of them is absent."""
    paths = [folder / name for name in names]
    return paths if all(path.is_file() for path in paths) else None


Pair = tuple[Tensor, Tensor]  # pixels [N, 3, h, w] and labels [N]


def arrays(
    classes: Sequence[str], train: Pair, test: Pair, *, checksums: Mapping[str, str] | None = None
) -> Contents:
    first, second = (Labelled(ArrayImages(pixels), labels) for pixels, labels in (train, test))
    return list(classes), first, second, checksums or {}


def lazy(classes: list[str], train: Files, test: Files, folder: Path, reading: Reading) -> Contents:
    """Image files, decoded when asked for."""
    checksum = tree_checksum([*train.paths, *test.paths], folder)
    first, second = (labelled(readable_only(files, reading), classes, reading) for files in (train, test))
    return classes, first, second, {"images": checksum}


def labelled(files: Files, classes: Sequence[str], reading: Reading) -> Labelled:
    return Labelled(FileImages(files.paths, reading.preprocessing), files.numbers(classes))


def readable_only(files: Files, reading: Reading) -> Files:
    """Those that can be decoded, if the others are to be skipped; else all."""
    if not reading.skip_unreadable:
        return files
    good, bad = readable(files)
    for path in bad.paths:
        reading.say(f"{path} cannot be read as an image; skipped")
    return good


def split_grey(grey: Tensor, labels: Tensor, test_share: float) -> tuple[Pair, Pair]:
    """Training and test images of [N, 1 or 3 equal channels, h, w]; the three channels share their memory."""
    names = [str(label) for label in labels.tolist()]
    train, test = (
        (grey[:, :1][rows].expand(-1, 3, -1, -1), labels[rows])
        for rows in stratified_split(names, test_share)
    )
    return train, test
