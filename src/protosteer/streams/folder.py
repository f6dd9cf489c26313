"""`folder:PATH`: a stream of your own images, in one folder per class.

PATH holds train/ and test/ (or val/), each with the same class folders, or the class folders themselves. In the second
case, one image in five of each class, drawn by a fixed seed, is held out for testing: at least one, never all. The draw
of a class depends only on its number of images.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from protosteer.data.class_folders import Files, read_folder, readable
from protosteer.data.datasets.base import Benchmark, Reading, labelled, readable_only
from protosteer.data.image_files import tree_checksum
from protosteer.data.labelled import Dataset
from protosteer.errors import DataError
from protosteer.streams.base import drawn_mask

PREFIX = "folder:"
TRAIN = "train"
TESTS = ("test", "val")
TEST_SHARE = 0.2


def benchmark(name: str) -> Benchmark:
    """Return the benchmark of `folder:PATH`."""
    if name == PREFIX:
        raise DataError(
            "folder: needs a path; write folder:PATH, with one sub-folder per class in PATH", code="no-folder"
        )
    path = Path(name.removeprefix(PREFIX)).expanduser()
    # Only the folder's own name: checksums identify the images, wherever the folder is.
    own, title = f"{PREFIX}{path.resolve().name}", f"Classes of {path}"
    return Benchmark(own, title, tasks=5, crop=None, load=functools.partial(load, path))


def load(path: Path, reading: Reading) -> Dataset:
    """Load the images of `folder:PATH`; the natural order of classes is alphabetical."""
    train, test = _splits(path, reading)
    classes = sorted({*train.labels, *test.labels})
    checksums = {TRAIN: tree_checksum(train.paths, path), TESTS[0]: tree_checksum(test.paths, path)}
    first, second = (labelled(files, classes, reading) for files in (train, test))
    return Dataset(path.name, classes, first, second, checksums)


def _splits(path: Path, reading: Reading) -> tuple[Files, Files]:
    tests = [path / name for name in TESTS if (path / name).is_dir()]
    if tests and (path / TRAIN).is_dir():
        return _files(path / TRAIN, reading), _files(tests[0], reading)
    files = _files(path, reading)
    if set(files.labels) == {TRAIN}:
        message = f"{path} has {TRAIN}/ but no {'/ or '.join(TESTS)}/; add one, or pass {path / TRAIN}"
        raise DataError(message, code="no-test-folder", path=path)
    labels = np.array(files.labels)
    is_test = np.zeros(len(files), dtype=bool)
    for label in np.unique(labels):
        own = labels == label
        is_test[own] = drawn_mask(int(own.sum()), TEST_SHARE)
    return files.rows(np.flatnonzero(~is_test)), files.rows(np.flatnonzero(is_test))


def _files(folder: Path, reading: Reading) -> Files:
    """List a folder's images; each is decoded once, so that a damaged one is found before the run."""
    files = read_folder(folder)
    bad = [] if reading.skip_unreadable else readable(files)[1].paths
    if bad:
        others = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        message = (
            f"{bad[0]} cannot be read as an image{others}; replace or remove it, or skip it with skip_unreadable=True"
        )
        raise DataError(message, code="unreadable-image", path=bad[0])
    left = readable_only(files, reading)
    empty = sorted(set(files.labels) - set(left.labels))
    if empty:
        message = f"no image in {folder / empty[0]} can be read; replace them or remove the folder"
        raise DataError(message, code="class-without-images", name=empty[0])
    return left
