"""`folder:PATH`: a stream of one's own images, which lie in a folder per class.

PATH holds train/ and test/ (or val/), each with the same class folders, or the class folders themselves.
In the second case one image in five of each class, drawn by a fixed seed, is kept for testing: at least one,
never all. The draw of a class depends on nothing but how many images it has.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from protosteer.data.datasets import Dataset, Labelled
from protosteer.data.folders import Files, read_folder, readable, tree_checksum, without
from protosteer.data.images import FileImages
from protosteer.errors import DataError
from protosteer.streams.base import Benchmark, LoadContext, held_out

PREFIX = "folder:"
TRAIN = "train"
TESTS = ("test", "val")
TEST_SHARE = 0.2
SPLIT_SEED = 0


def benchmark(name: str) -> Benchmark:
    """name: `folder:PATH`."""
    if name == PREFIX:
        raise DataError("folder: needs a path; write folder:PATH, with one sub-folder per class in PATH")
    path = Path(name.removeprefix(PREFIX)).expanduser()
    # The folder's own name only: checksums tell the images, wherever the folder stands and however it is written.
    called = f"{PREFIX}{path.resolve().name}"
    return Benchmark(called, f"Classes of {path}", tasks=5, crop=None, load=partial(load, path))


def load(path: Path, context: LoadContext) -> Dataset:
    """Class names in alphabetical order are the natural order."""
    train, test = _splits(path, context)
    classes = sorted({*train.labels, *test.labels})
    return Dataset(
        path.name,
        classes,
        Labelled(FileImages(train.paths, context.preprocessing), train.numbers(classes)),
        Labelled(FileImages(test.paths, context.preprocessing), test.numbers(classes)),
        {TRAIN: tree_checksum(train.paths, path), TESTS[0]: tree_checksum(test.paths, path)},
    )


def _splits(path: Path, context: LoadContext) -> tuple[Files, Files]:
    tests = [path / name for name in TESTS if (path / name).is_dir()]
    if tests and (path / TRAIN).is_dir():
        return _files(path / TRAIN, context), _files(tests[0], context)
    files = _files(path, context)
    if set(files.labels) == {TRAIN}:
        raise DataError(f"{path} has {TRAIN}/ but no {'/ or '.join(TESTS)}/; add one, or give {path / TRAIN}")
    labels = np.array(files.labels)
    is_test = np.zeros(len(files), dtype=bool)
    for label in np.unique(labels):
        own = labels == label
        is_test[own] = held_out(int(own.sum()), TEST_SHARE, SPLIT_SEED)
    return files.rows(np.flatnonzero(~is_test)), files.rows(np.flatnonzero(is_test))


def _files(folder: Path, context: LoadContext) -> Files:
    """Every image is decoded once before the run: a damaged one is better found now than in the last task."""
    files = read_folder(folder)
    _, bad = readable(files.paths)
    if bad and not context.skip_unreadable:
        others = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise DataError(
            f"{bad[0]} cannot be read as an image{others}; replace or remove it, or leave it out with "
            "skip_unreadable=True"
        )
    for path in bad:
        context.say(f"{path} cannot be read as an image; skipped")
    left = without(files, bad)
    empty = sorted(set(files.labels) - set(left.labels))
    if empty:
        raise DataError(f"no image in {folder / empty[0]} can be read; replace them or remove the folder")
    return left
