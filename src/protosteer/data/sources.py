"""Read images from a folder, a list, or an image set saved by `datasets`; all become paths."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from protosteer.data.class_folders import Files, read_folder
from protosteer.data.hf_arrow import is_set, read_set
from protosteer.data.image_files import image_files
from protosteer.data.image_lists import is_list, label_of, read_paths, read_table
from protosteer.errors import DataError


def image_paths(source: Path) -> list[Path]:
    """Return the images of a list or saved set, the file itself, or every image below a folder."""
    if is_list(source):
        return read_paths(source)
    return [path for path, _ in read_set(source)] if is_set(source) else image_files(source)


def read_labelled(source: Path, class_names: Sequence[str] | None = None) -> Files:
    """Read images and labels of a folder of class folders, a list or a saved set."""
    if not (is_list(source) or is_set(source)):
        return read_folder(source, class_names)
    files = read_table(source) if is_list(source) else _set_files(source)
    if class_names is None:
        return files
    absent_class = next((name for name in class_names if name not in set(files.labels)), None)
    if absent_class is not None:
        raise DataError(f"{source} has no images of class {absent_class}", code="missing-class", name=absent_class)
    name_set = set(class_names)
    return files.rows(i for i, label in enumerate(files.labels) if label in name_set)


def _set_files(folder: Path) -> Files:
    """Read a saved set, sorted by class as a folder would be."""
    pairs = []
    for path, cell in read_set(folder):
        label = label_of(cell)
        if label is None:
            message = f"{path} has no label; {folder} needs a column label: classes, words or numbers"
            raise DataError(message, code="missing-label", path=path)
        pairs.append((path, label))
    return Files.of(sorted(pairs, key=itemgetter(1)))
