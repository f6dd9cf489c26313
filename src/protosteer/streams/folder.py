"""`folder:PATH`: a stream of your own images, in one folder per class; `domains:PATH`: of such folders, one per domain.

PATH holds train/ and test/ (or val/), each with the same class folders, or the class folders themselves. In the second
case, one image in five of each class, drawn by a fixed seed, is held out for testing: at least one, never all. The draw
of a class depends only on its number of images.

`domains:PATH` has a task for each sub-folder of PATH, and classes may return in several. A sub-folder is as PATH above;
or its images are listed in DOMAIN_train.txt and DOMAIN_test.txt beside it, as those of DomainNet are.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from protosteer.data.class_folders import Files, read_folder, read_lists, split_readable
from protosteer.data.datasets.base import Benchmark, Reading, all_of, labelled, lazy, readable_only
from protosteer.data.image_files import tree_checksum
from protosteer.data.labelled import Dataset, join
from protosteer.errors import DataError
from protosteer.streams.base import draw_mask
from protosteer.util.text import counted

PREFIX, DOMAINS = "folder:", "domains:"
TRAIN = "train"
TESTS = ("test", "val")
TEST_SHARE = 0.2


def benchmark(name: str) -> Benchmark:
    """Return the benchmark of `folder:PATH` or `domains:PATH`."""
    prefix, domains = (DOMAINS, True) if name.startswith(DOMAINS) else (PREFIX, False)
    if name == prefix:
        parts = "domain" if domains else "class"
        raise DataError(f"{prefix} needs a path; write {prefix}PATH, with one sub-folder per {parts}", code="no-folder")
    path = Path(name.removeprefix(prefix)).expanduser()
    # Only the folder's own name: checksums identify the images, wherever the folder is.
    short_name, title = f"{prefix}{path.resolve().name}", f"{'Domains' if domains else 'Classes'} of {path}"
    load_images = functools.partial(load_domains if domains else load, path)
    return Benchmark(short_name, title, tasks=5, crop=None, load=load_images, domains=domains)


def load(path: Path, reading: Reading) -> Dataset:
    """Load the images of `folder:PATH`; the natural order of classes is alphabetical."""
    dataset = _load(path, reading)
    if len(dataset.classes) == 1:
        reading.say(
            f"{path} has one class, {dataset.classes[0]}: every prediction is right; to compare, give two or more"
        )
    return dataset


def _load(path: Path, reading: Reading) -> Dataset:
    train, test = _split_files(path, reading)
    classes = sorted({*train.labels, *test.labels})
    checksums = {TRAIN: tree_checksum(train.paths, path), TESTS[0]: tree_checksum(test.paths, path)}
    train_part, test_part = (labelled(files, classes, reading) for files in (train, test))
    return Dataset(path.name, classes, train_part, test_part, checksums)


def load_domains(path: Path, reading: Reading) -> Dataset:
    """Load the images of `domains:PATH`; classes are named DOMAIN/CLASS, and the natural order is alphabetical."""
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; give one with a sub-folder per domain", code="no-folder", path=path)
    domains = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(domains) < 2:
        message = (
            f"{path} has {counted(len(domains), 'sub-folder')}; give a folder with one for each of several domains"
        )
        raise DataError(message, code="too-few-tasks", path=path)
    return join(path.name, {domain.name: _load_domain(domain, reading) for domain in domains})


def _load_domain(folder: Path, reading: Reading) -> Dataset:
    lists = all_of(folder.parent, *(f"{folder.name}_{half}.txt" for half in (TRAIN, TESTS[0])))
    if not lists:
        return _load(folder, reading)
    classes, (train, test) = read_lists(*lists)
    return Dataset(folder.name, *lazy(classes, train, test, folder.parent, reading))


def _split_files(path: Path, reading: Reading) -> tuple[Files, Files]:
    tests = [path / name for name in TESTS if (path / name).is_dir()]
    if tests and (path / TRAIN).is_dir():
        return _list_files(path / TRAIN, reading), _list_files(tests[0], reading)
    files = _list_files(path, reading)
    if set(files.labels) == {TRAIN}:
        message = f"{path} has {TRAIN}/ but no {'/ or '.join(TESTS)}/; add one, or pass {path / TRAIN}"
        raise DataError(message, code="no-test-folder", path=path)
    labels = np.array(files.labels)
    is_test = np.zeros(len(files), dtype=bool)
    for label in np.unique(labels):
        mask = labels == label
        is_test[mask] = draw_mask(int(mask.sum()), TEST_SHARE)
    return files.rows(np.flatnonzero(~is_test)), files.rows(np.flatnonzero(is_test))


def _list_files(folder: Path, reading: Reading) -> Files:
    """List a folder's images; each is decoded once, so that a damaged one is found before the run."""
    files = read_folder(folder)
    bad_paths = [] if reading.skip_unreadable else split_readable(files)[1].paths
    if bad_paths:
        note = f", and {len(bad_paths) - 1} more" if len(bad_paths) > 1 else ""
        advice = "replace or remove it, or skip it with skip_unreadable=True"
        message = f"{bad_paths[0]} cannot be read as an image{note}; {advice}"
        raise DataError(message, code="unreadable-image", path=bad_paths[0])
    good_files = readable_only(files, reading)
    empty_classes = sorted(set(files.labels) - set(good_files.labels))
    if empty_classes:
        message = f"no image in {folder / empty_classes[0]} can be read; replace them or remove the folder"
        raise DataError(message, code="class-without-images", name=empty_classes[0])
    return good_files
