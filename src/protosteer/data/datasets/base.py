"""Types that describe data sets and benchmarks, and helpers that several data sets share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from protosteer.data.class_folders import Files, split_readable, stratified_split
from protosteer.data.downloads import Remote, Say, to_stderr
from protosteer.data.image_files import tree_checksum
from protosteer.data.images import ArrayImages, FileImages
from protosteer.data.labelled import Dataset, Labelled
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

NUMERALS = tuple("0123456789")


@dataclass(frozen=True)
class Reading:
    """Options of reading image folders; arrays need none of them.

    Attributes:
        preprocessing: Of the images.
        skip_unreadable: Skip images that cannot be decoded, and report them; otherwise the first one raises.
        say: Is called with each report.
    """

    preprocessing: Preprocessing
    skip_unreadable: bool = False
    say: Say = to_stderr


# Classes, training and test images, and a checksum if the images are separate files.
Contents = tuple[list[str], Labelled, Labelled, Mapping[str, str]]


@dataclass(frozen=True)
class DatasetInfo:
    """Describe a data set before any of its files is read.

    Attributes:
        find: Returns the data set's files in a folder, or None. A folder stands for all images in it.
        read: Reads these files, and checks their form but not their checksums.
    """

    name: str
    title: str
    classes: int
    licence: str
    source: str
    find: Callable[[Path], Sequence[Path] | None]
    read: Callable[[Sequence[Path], Reading], Contents]
    files: tuple[Remote, ...] = ()
    accepted: tuple[Remote, ...] = ()  # other archives that a user may have put there
    folders: tuple[str, ...] = ()  # official names, beside those in archives
    md5: Mapping[str, str] = field(default_factory=dict)  # official, beside those of `files`, by file name
    own_folder: bool = False  # other data sets use the same file names, so the folder's name decides
    shipped_with: str = ""  # a package that contains it
    shipped_in: str = ""
    by_hand: str = ""  # what a user must put where, if it may not be redistributed
    note: str = ""

    @property
    def size(self) -> int | None:
        """Return the bytes to download, if known."""
        sizes = [file.size or 0 for file in self.files]
        return sum(sizes) if sizes and all(sizes) else None

    @property
    def official(self) -> dict[str, str | None]:
        """Return official checksums by file name."""
        return {**{file.name: file.md5 for file in self.files}, **self.md5}

    def folders_below(self, root: Path) -> list[Path]:
        """List the folders in which it may be, the most likely first."""
        if self.shipped_with:
            package = find_spec(self.shipped_with)
            return [Path(package.origin).parent / self.shipped_in] if package and package.origin else []
        archives = (*self.files, *self.accepted)
        folders = [*(archive.folder for archive in archives if archive.folder), *self.folders]
        dataset_folder = root / self.name
        paths = [dataset_folder, *(parent / folder for parent in (dataset_folder, root) for folder in folders)]
        if not self.own_folder or root.name in {self.name, *(folder.split("/")[0] for folder in folders)}:
            paths += [root, *(root / folder.partition("/")[2] for folder in folders if "/" in folder)]
        return paths

    def locate(self, root: Path) -> Path | None:
        """Return the folder that holds all its files, if there is one."""
        return next((path for path in self.folders_below(root) if self.find(path) is not None), None)

    def load(self, folder: Path, reading: Reading) -> Dataset:
        """Read the data set from a folder that `locate` returned; raise `DataError` if files are missing."""
        files = self.find(folder)
        if files is None:
            raise DataError(f"{folder} has lost some files; put them back", code="incomplete-folder", path=folder)
        return Dataset(self.name, *self.read(files, reading))


@dataclass(frozen=True)
class Benchmark:
    """Describe a benchmark: classes learned task by task, as the literature does it.

    Attributes:
        tasks: Number of tasks.
        crop: Share of the resized image that the centre crop keeps; None leaves it to the weights.
        datasets: Names of its data sets, joined in this order.
        load: Reads its data set, if it is none of those.
        domains: Whether a task is a domain, in which classes return: classes are named DOMAIN/CLASS.
    """

    name: str
    title: str
    tasks: int
    crop: float | None
    datasets: tuple[str, ...] = ()
    load: Callable[[Reading], Dataset] | None = None
    domains: bool = False


def all_of(folder: Path, *names: str) -> list[Path] | None:
    """Return the files of these names in a folder, or None if one is missing."""
    paths = [folder / name for name in names]
    return paths if all(path.is_file() for path in paths) else None


Pair = tuple[Tensor, Tensor]  # pixels [N, 3, h, w] and labels [N]


def arrays(classes: Sequence[str], train: Pair, test: Pair, *, checksums: Mapping[str, str] | None = None) -> Contents:
    """Return the contents of a data set whose images are in memory."""
    train_part, test_part = (Labelled(ArrayImages(pixels), labels) for pixels, labels in (train, test))
    return list(classes), train_part, test_part, checksums or {}


def lazy(classes: list[str], train: Files, test: Files, folder: Path, reading: Reading) -> Contents:
    """Return the contents of a data set whose image files are decoded on demand."""
    checksum = tree_checksum([*train.paths, *test.paths], folder)
    train_part, test_part = (labelled(readable_only(files, reading), classes, reading) for files in (train, test))
    return classes, train_part, test_part, {"images": checksum}


def labelled(files: Files, classes: Sequence[str], reading: Reading) -> Labelled:
    """Return image files with the numbers of their classes."""
    return Labelled(FileImages(files.paths, reading.preprocessing), files.numbers(classes))


def readable_only(files: Files, reading: Reading) -> Files:
    """Return all files, or those that can be decoded if the others are to be skipped."""
    if not reading.skip_unreadable:
        return files
    readable_files, unreadable_files = split_readable(files)
    for path in unreadable_files.paths:
        reading.say(f"{path} cannot be read as an image; skipped")
    return readable_files


def split_grey(grey: Tensor, labels: Tensor, test_share: float) -> tuple[Pair, Pair]:
    """Split grey images [N, 1 or 3, h, w] into training and test images whose three channels share memory."""
    names = [str(label) for label in labels.tolist()]
    train, test = (
        (grey[:, :1][rows].expand(-1, 3, -1, -1), labels[rows]) for rows in stratified_split(names, test_share)
    )
    return train, test


def damaged_file(path: Path, fault: str) -> DataError:
    """Return the error for a file of a data set that cannot be read."""
    return DataError(f"{path} {fault}; fetch it again", code="damaged-file", path=path)
