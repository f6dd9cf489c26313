"""A benchmark is a sequence of tasks; a task brings classes that no other task has.

A dataset becomes a stream by `build`, the same for every benchmark: the classes are ordered and shared out
(options.py), and a task gets the rows of its classes, in file order whatever the order of the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from protosteer.data.datasets import Dataset, Labelled
from protosteer.data.images import Chosen, ImageSet
from protosteer.data.sets.base import Benchmark
from protosteer.errors import DataError
from protosteer.streams.options import StreamOptions, group_classes

VALIDATION_SEED = 0


@dataclass
class Task:
    """One step of a stream: its own classes, with images to learn from and images to be judged by."""

    name: str
    classes: list[str]
    train: ImageSet
    train_labels: list[str]
    test: ImageSet
    test_labels: list[str]

    def __post_init__(self) -> None:
        for part, images, labels in (
            ("training", self.train, self.train_labels),
            ("test", self.test, self.test_labels),
        ):
            if len(images) != len(labels):
                raise DataError(f"task {self.name!r}: {len(images)} {part} images but {len(labels)} labels")
            strangers = set(labels) - set(self.classes)
            if strangers:
                raise DataError(f"task {self.name!r}: {part} labels {sorted(strangers)} are not its classes")


class Stream(Sequence[Task]):
    """Tasks in the order in which they are met; `classes` in order of appearance.

    about: where the tasks come from, ready for JSON; empty for a stream that was put together by hand.
    """

    def __init__(self, name: str, tasks: Sequence[Task], about: dict[str, Any] | None = None):
        self.name = name
        self.tasks = list(tasks)
        self.about = dict(about or {})
        self.classes = [label for task in self.tasks for label in task.classes]
        repeated = sorted({label for label in self.classes if self.classes.count(label) > 1})
        if repeated:
            raise DataError(f"stream {name!r}: {repeated} are in more than one task; a class belongs to one")

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        return self.tasks[index]


def build(benchmark: Benchmark, dataset: Dataset, options: StreamOptions | None = None) -> Stream:
    """The dataset as tasks. Images are views of the dataset's, nothing is copied."""
    options = options or StreamOptions()
    groups = group_classes(dataset.classes, options, benchmark.tasks)
    learned, judged = dataset.train, dataset.test
    train = [rows[: options.train_per_class] for rows in _rows_by_class(learned, dataset)]
    test = _rows_by_class(judged, dataset)
    if options.validation:
        judged = learned
        masks = [drawn_mask(len(rows), options.validation, VALIDATION_SEED) for rows in train]
        test = [rows[mask] for rows, mask in zip(train, masks, strict=True)]
        train = [rows[~mask] for rows, mask in zip(train, masks, strict=True)]
    test = [rows[: options.test_per_class] for rows in test]
    _check_images(dataset, groups, {"training": train, options.judged_on: test})
    tasks = [
        _task(f"task-{i + 1}", group, dataset.classes, (learned, train), (judged, test))
        for i, group in enumerate(groups)
    ]
    return Stream(benchmark.name, tasks, _about(benchmark, dataset, options, tasks))


def drawn_mask(count: int, share: float, seed: int) -> np.ndarray:
    """A mask [count] that is true for this share of the rows: at least one, but never all, drawn by the seed.

    Each class is drawn alone and by the same seed, so that a class's images do not depend on other classes.
    """
    mask = np.zeros(count, dtype=bool)
    size = max(0, min(max(1, round(count * share)), count - 1))
    mask[np.random.RandomState(seed).permutation(count)[:size]] = True
    return mask


Rows = list[np.ndarray]  # by class number, each in file order


def _rows_by_class(part: Labelled, dataset: Dataset) -> Rows:
    labels = part.labels.numpy()
    ends = np.bincount(labels, minlength=len(dataset.classes)).cumsum()
    return np.split(labels.argsort(kind="stable"), ends[:-1])


def _check_images(dataset: Dataset, groups: list[list[str]], parts: dict[str, Rows]) -> None:
    """Classes that a task file leaves out may lack images."""
    wanted = {label for group in groups for label in group}
    for kind, rows_of in parts.items():
        for label, rows in zip(dataset.classes, rows_of, strict=True):
            if label in wanted and not len(rows):
                raise DataError(f"class {label!r} has no {kind} image; add images or leave the class out")


def _task(
    name: str, group: list[str], classes: list[str], train: tuple[Labelled, Rows], test: tuple[Labelled, Rows]
) -> Task:
    numbers = [classes.index(label) for label in group]
    parts: list[Any] = []
    for part, rows_of in (train, test):
        rows = np.sort(np.concatenate([rows_of[k] for k in numbers]))
        parts += [Chosen(part.images, rows.tolist()), [classes[k] for k in part.labels[rows].tolist()]]
    return Task(name, group, *parts)


def _about(
    benchmark: Benchmark, dataset: Dataset, options: StreamOptions, tasks: list[Task]
) -> dict[str, Any]:
    return {
        "name": benchmark.name,
        "options": options.to_dict(),
        "judged_on": options.judged_on,
        "checksums": dict(dataset.checksums),
        "class_order": [label for task in tasks for label in task.classes],
        "tasks": [
            {
                "name": task.name,
                "classes": task.classes,
                "train_images": len(task.train),
                "test_images": len(task.test),
            }
            for task in tasks
        ],
    }
