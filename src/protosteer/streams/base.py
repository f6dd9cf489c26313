"""A benchmark is a sequence of tasks; each has classes of its own, by which it is judged.

A dataset becomes a stream by `build`, the same for every benchmark: the classes are ordered and shared out
(options.py), and a task gets the rows of its classes, in file order whatever the order of the classes. Where task
boundaries are blurry, some training images visit other tasks (blurring.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from torch import Tensor

from protosteer.data.datasets.base import Benchmark
from protosteer.data.images import Chosen, ImageSet
from protosteer.data.labelled import Dataset, Labelled
from protosteer.errors import DataError
from protosteer.streams.blurry import Rows, share_out
from protosteer.streams.options import StreamOptions, group_classes

DRAW_SEED = 0  # part of every stream's definition


@dataclass
class Task:
    """One step of a stream: its own classes, with images to learn from and images to be judged by.

    visiting: classes of other tasks of which it has some images to learn from.
    """

    name: str
    classes: list[str]
    train: ImageSet
    train_labels: list[str]
    test: ImageSet
    test_labels: list[str]
    visiting: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for part, images, labels, classes in (
            ("training", self.train, self.train_labels, self.learned),
            ("test", self.test, self.test_labels, self.classes),
        ):
            if len(images) != len(labels):
                raise DataError(f"task {self.name!r}: {len(images)} {part} images but {len(labels)} labels")
            strangers = set(labels) - set(classes)
            if strangers:
                raise DataError(f"task {self.name!r}: {part} labels {sorted(strangers)} are not its classes")

    @property
    def learned(self) -> list[str]:
        """All classes that it may have training images of."""
        return [*self.classes, *self.visiting]

    @property
    def visitors(self) -> dict[str, int]:
        """How many training images of other tasks' classes there are, by class."""
        return {name: self.train_labels.count(name) for name in self.visiting}


class Lent(Chosen):
    """Images that can be read until they are given back."""

    def __init__(self, images: ImageSet, task: str):
        super().__init__(images, range(len(images)))
        self.task = task
        self.over = False

    def pixels(self, rows: Sequence[int]) -> Tensor:
        if self.over:
            raise DataError(
                f"task {self.task!r} is over and its images are gone; a method that needs them later keeps a buffer"
            )
        return super().pixels(rows)


@dataclass(frozen=True)
class TaskData:
    """A task as a method sees it: its training images as long as it is being learned, and no others."""

    name: str
    classes: list[str]
    train: ImageSet
    train_labels: list[str]


@contextmanager
def lesson(task: Task | TaskData) -> Iterator[TaskData]:
    """A task to learn from; whatever a method has kept of it afterwards, its images cannot be read again."""
    lent = Lent(task.train, task.name)
    try:
        classes = task.learned if isinstance(task, Task) else list(task.classes)
        yield TaskData(task.name, classes, lent, list(task.train_labels))
    finally:
        lent.over = True


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

    @property
    def blurry(self) -> bool:
        """Whether a class may come in several tasks."""
        return any(task.visiting for task in self.tasks)

    def seen(self, i: int) -> set[str]:
        """The classes that have come by the end of task i."""
        return {label for task in self.tasks[: i + 1] for label in task.learned}

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
        masks = [drawn_mask(len(rows), options.validation) for rows in train]
        test = [rows[mask] for rows, mask in zip(train, masks, strict=True)]
        train = [rows[~mask] for rows, mask in zip(train, masks, strict=True)]
    test = [rows[: options.test_per_class] for rows in test]
    numbers = [[dataset.classes.index(label) for label in group] for group in groups]
    _check_images(numbers, dataset.classes, {"training": train, options.judged_on: test})
    tasks, trains = [], share_out(train, numbers, options.blurry, options.disjoint, options.seed)
    for i, (own, rows) in enumerate(zip(numbers, trains, strict=True), 1):
        visiting = [k for k in range(len(rows)) if k not in own and len(rows[k])]
        parts = _part(learned, rows, [*own, *visiting], dataset), _part(judged, test, own, dataset)
        names = [[dataset.classes[k] for k in some] for some in (own, visiting)]
        tasks.append(Task(f"task-{i}", names[0], *parts[0], *parts[1], names[1]))
    return Stream(benchmark.name, tasks, _about(benchmark, dataset, options, tasks))


def drawn_mask(count: int, share: float) -> np.ndarray:
    """A mask [count], true for this share of the rows: at least one, but never all, drawn by a fixed seed.

    Each class is drawn alone and by the same seed, so that a class's images do not depend on other classes.
    """
    mask = np.zeros(count, dtype=bool)
    size = max(0, min(max(1, round(count * share)), count - 1))
    mask[np.random.RandomState(DRAW_SEED).permutation(count)[:size]] = True
    return mask


def _rows_by_class(part: Labelled, dataset: Dataset) -> Rows:
    labels = part.labels.numpy()
    ends = np.bincount(labels, minlength=len(dataset.classes)).cumsum()
    return np.split(labels.argsort(kind="stable"), ends[:-1])


def _check_images(groups: list[list[int]], classes: list[str], parts: dict[str, Rows]) -> None:
    """Only classes of a task need images: a task file may leave others out."""
    for group in groups:
        for kind, rows_of in parts.items():
            for k in group:
                if not len(rows_of[k]):
                    raise DataError(
                        f"class {classes[k]!r} has no {kind} image; add images or leave the class out"
                    )


def _part(part: Labelled, rows_of: Rows, numbers: list[int], dataset: Dataset) -> tuple[ImageSet, list[str]]:
    """The rows of some classes as images, in file order, and their labels."""
    rows = np.sort(np.concatenate([rows_of[k] for k in numbers]))
    return Chosen(part.images, rows.tolist()), [dataset.classes[k] for k in part.labels[rows].tolist()]


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
                **({"visiting": task.visitors} if options.blurry else {}),
            }
            for task in tasks
        ],
    }
