"""Read labelled image files from class folders and list files, split them, and find unreadable ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protosteer.data.decode_budget import DECODING, decoded_bytes
from protosteer.data.image_files import images_below, in_threads, is_image, opened, text_lines
from protosteer.errors import DataError

SPLIT_SEED = 0  # defines the split of data sets without a published one


@dataclass(frozen=True)
class Files:
    """Image files in order, each with the name of its class."""

    paths: list[Path]
    labels: list[str]

    @classmethod
    def of(cls, pairs: Iterable[tuple[Path, str]]) -> Files:
        """Collect pairs of a path and a label."""
        paths, labels = [], []
        for path, label in pairs:
            paths.append(path)
            labels.append(label)
        return cls(paths, labels)

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, numbers: Iterable[int]) -> Files:
        """Select files by row number, in the order given."""
        indices = [int(number) for number in numbers]
        return Files([self.paths[i] for i in indices], [self.labels[i] for i in indices])

    def numbers(self, classes: Sequence[str]) -> Tensor:
        """Return the index of each label in `classes`, int64 [N]."""
        index = {name: i for i, name in enumerate(classes)}
        for path, label in zip(self.paths, self.labels, strict=True):
            if label not in index:
                message = f"{path} is of unknown class {label!r}; add the class, or remove the file"
                raise DataError(message, code="unknown-class", name=label)
        return torch.tensor([index[label] for label in self.labels], dtype=torch.long)


def rows_by_label(labels: Sequence[str]) -> dict[str, list[int]]:
    """Map each label to its rows; both are in the order in which they occur."""
    rows: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    return rows


def read_folder(folder: Path, class_names: Sequence[str] | None = None) -> Files:
    """List every image of a folder of class folders: of `class_names` in that order, or of all classes, by alphabet."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        message = f"{folder} {problem}; give a folder that has one sub-folder per class"
        raise DataError(message, code="no-class-folders", path=folder)
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    loose = next((entry for entry in entries if is_image(entry)), None)
    if loose is not None:
        message = f"{loose} lies outside any class folder; move it into a folder named after its class"
        raise DataError(message, code="loose-image", path=loose)
    classes = [entry for entry in entries if entry.is_dir()]
    if not classes:
        message = f"{folder} has no class folders; make one per class and put its images there"
        raise DataError(message, code="no-class-folders", path=folder)
    if class_names is not None:
        missing_name = next((name for name in class_names if folder / name not in classes), None)
        if missing_name is not None:
            message = f"{folder} has no class folder {missing_name}; put its images there"
            raise DataError(message, code="missing-class", name=missing_name)
        classes = [folder / name for name in class_names]
    pairs: list[tuple[Path, str]] = []
    for entry in classes:
        paths = images_below(entry)
        if not paths:
            message = f"class folder {entry} holds no image files; add images or remove the folder"
            raise DataError(message, code="empty-class-folder", path=entry)
        pairs += ((path, entry.name) for path in paths)
    return Files.of(pairs)


def nested_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that have no image of their own but sub-folders with images.

    `read_folder` takes them as classes. They may be months, or other groups, whose sub-folders are the classes.
    """

    def visible(place: Path) -> list[Path]:
        return sorted(entry for entry in place.iterdir() if not entry.name.startswith("."))

    def has_images(place: Path) -> bool:
        return any(map(is_image, visible(place)))

    def is_group(place: Path) -> bool:
        return not has_images(place) and any(below.is_dir() and has_images(below) for below in visible(place))

    return [entry for entry in visible(folder) if entry.is_dir() and is_group(entry)] if folder.is_dir() else []


def read_lists(*paths: Path) -> tuple[list[str], list[Files]]:
    """Read class names and the images of several list files; see `read_list` and `name_classes`."""
    return name_classes(*(read_list(path) for path in paths))


def read_list(path: Path) -> Files:
    """Read a list file: each line has the path of an image and a label, which is a name or a number.

    Paths are relative to the list's own folder, or to its parent if the first image is there. Blank lines and
    lines that begin with # are skipped.
    """
    pairs: list[tuple[Path, str]] = []
    base = path.parent
    for number, line in text_lines(path):
        words = line.rsplit(maxsplit=1)
        if len(words) != 2:
            message = f'{path}, line {number}: {line!r} is not "relative/path label"'
            raise DataError(message, code="bad-list", path=path, line=number)
        if not pairs and not (base / words[0]).is_file():
            base = base.parent
        if not (base / words[0]).is_file():
            message = f"{path}, line {number}: {base / words[0]} is not there; unpack the images beside the list"
            raise DataError(message, code="missing-file", path=base / words[0])
        pairs.append((base / words[0], words[1]))
    if not pairs:
        raise DataError(f"{path} lists no images", code="no-images", path=path)
    return Files.of(pairs)


def name_classes(*lists: Files) -> tuple[list[str], list[Files]]:
    """Return class names in natural order, and the lists with these names as labels.

    If all labels are numbers, they keep their order and take the names of their folders if there is one folder
    per class, as in ImageNet. Other labels are sorted alphabetically.
    """
    labels = {label for files in lists for label in files.labels}
    if not all(label.isdecimal() for label in labels):
        return sorted(labels), list(lists)
    folders: dict[str, set[str]] = {label: set() for label in labels}
    for files in lists:
        for path, label in zip(files.paths, files.labels, strict=True):
            folders[label].add(path.parent.name)
    one_folder_each = all(len(names) == 1 for names in folders.values())
    names = {label: next(iter(parents)) if one_folder_each else str(int(label)) for label, parents in folders.items()}
    if len(set(names.values())) < len({int(label) for label in labels}):
        names = {label: str(int(label)) for label in labels}
    classes = list(dict.fromkeys(names[label] for label in sorted(labels, key=int)))
    return classes, [Files(files.paths, [names[label] for label in files.labels]) for files in lists]


def stratified_split(labels: Sequence[str], test_share: float, seed: int = SPLIT_SEED) -> tuple[list[int], list[int]]:
    """Split row numbers into training and test rows, each ascending, with the same share of every class."""
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(labels))
    try:
        train, test = train_test_split(rows, test_size=test_share, stratify=labels, random_state=seed)
    except ValueError as error:
        message = f"{len(labels)} images cannot be split into training and test images: {error}"
        raise DataError(message, code="cannot-split") from error
    return sorted(train.tolist()), sorted(test.tolist())


def split_readable(files: Files) -> tuple[Files, Files]:
    """Decode all files; return those that decode and those that do not."""
    decodes = np.fromiter(in_threads(_decodes, files.paths), bool, len(files))
    return files.rows(decodes.nonzero()[0]), files.rows((~decodes).nonzero()[0])


def _decodes(path: Path) -> bool:
    try:
        with opened(path) as image, DECODING.reserve(decoded_bytes(image)):
            image.load()
    except DataError:
        return False
    return True
