"""What a data set's file is made of: its record, its row as a benchmark, and what several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from protosteer.data.datasets import Dataset, Labelled
from protosteer.data.downloads import Remote, Say, to_stderr
from protosteer.data.files import tree_checksum
from protosteer.data.folders import Files, readable, stratified_split
from protosteer.data.images import ArrayImages, FileImages
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


def remote(
    pages: Sequence[str], name: str, size: int | None, md5: str | None = None, folder: str | None = None
) -> Remote:
    return Remote(name, size, tuple(f"{page}/{name}" for page in pages), md5, folder)


def md5_of(files: Sequence[Remote]) -> dict[str, str]:
    return {file.name: file.md5 for file in files if file.md5}


def all_of(folder: Path, *names: str) -> list[Path] | None:
    """The files of these names, or None where one of them is absent."""
    paths = [folder / name for name in names]
    return paths if all(path.is_file() for path in paths) else None


def gone(folder: Path) -> NoReturn:
    raise DataError(f"{folder} does not hold all files any more; look what became of them")


# A folder that has been found -> a data set; the checksums of single files are added when it is opened


def arrays(
    name: str, classes: Sequence[str], train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> Dataset:
    first, second = (Labelled(ArrayImages(pixels), labels) for pixels, labels in (train, test))
    return Dataset(name, list(classes), first, second)


def lazy(
    name: str, classes: Sequence[str], train: Files, test: Files, folder: Path, reading: Reading
) -> Dataset:
    """Image files, decoded when asked for."""
    checksum = tree_checksum([*train.paths, *test.paths], folder)
    parts = []
    for files in (train, test):
        kept = readable_only(files, reading)
        parts.append(Labelled(FileImages(kept.paths, reading.preprocessing), kept.numbers(classes)))
    return Dataset(name, list(classes), parts[0], parts[1], {"images": checksum})


def readable_only(files: Files, reading: Reading) -> Files:
    """Those that can be decoded, if the others are to be skipped; else all."""
    if not reading.skip_unreadable:
        return files
    good, bad = readable(files)
    if bad:
        reading.say(f"{len(bad)} unreadable images are left out: {', '.join(str(path) for path in bad)}")
    return good


def split_grey(
    grey: Tensor, labels: Tensor, test_share: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images of [N, 1 or 3 equal channels, h, w]; the three channels share their memory."""
    names = [str(label) for label in labels.tolist()]
    train, test = (
        (grey[:, :1][rows].expand(-1, 3, -1, -1), labels[rows])
        for rows in stratified_split(names, test_share)
    )
    return train, test
