"""Benchmarks as sequences of tasks, each with its own classes.

`build` turns any dataset into a stream. It orders the classes and splits them into tasks (`options.py`). A task gets
the rows of its classes, in file order. With blurry task boundaries, some training images move to other tasks
(`blurry.py`).
"""

from __future__ import annotations

import functools
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
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.streams.blurry import Rows, distribute
from protosteer.streams.options import StreamOptions, group_classes, group_domains

DRAW_SEED = 0  # part of the definition of every stream


@dataclass
class Task:
    """One task of a stream: its classes, its training images and its test images.

    Attributes:
        name: The name of the task.
        classes: The task's own classes; its test images belong to them.
        train: The training images.
        train_labels: The class name of each training image.
        test: The test images.
        test_labels: The class name of each test image.
        visiting: Classes of other tasks that have some training images here (blurry task boundaries).
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
                message = f"task {self.name!r}: {len(images)} {part} images but {len(labels)} labels"
                raise DataError(message, code="label-count-mismatch", task=self.name)
            foreign_labels = sorted(set(labels) - set(classes))
            if foreign_labels:
                message = f"task {self.name!r}: {part} labels {foreign_labels} are not among its classes"
                raise DataError(message, code="foreign-labels", labels=foreign_labels)

    @property
    def learned(self) -> list[str]:
        """All classes that may have training images here."""
        return [*self.classes, *self.visiting]

    @property
    def visitors(self) -> dict[str, int]:
        """The number of training images of each visiting class."""
        return {name: self.train_labels.count(name) for name in self.visiting}


class RevocableImages(Chosen):
    """Images of a task that cannot be read any more once they are revoked."""

    def __init__(self, images: ImageSet, task: str):
        super().__init__(images, range(len(images)))
        self.task = task
        self.is_revoked = False

    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Return the images of these rows; an error (code "task-is-over") once they are revoked."""
        if self.is_revoked:
            message = (
                f"task {self.task!r} is over and its images cannot be read; a method that needs them keeps a buffer"
            )
            raise DataError(message, code="task-is-over", task=self.task)
        return super().pixels(rows)


@dataclass(frozen=True)
class TrainingTask:
    """One task as a method sees it: its training images and labels, and nothing of other tasks.

    Attributes:
        name: The name of the task.
        classes: The names of all classes that have training images.
        train: The training images; readable only while the task is learned.
        train_labels: The class name of each image.
        on_stage: Called with progress; None: no progress.
        checkpoint: Where training is saved and resumed from; None: nowhere.
    """

    name: str
    classes: list[str]
    train: ImageSet
    train_labels: list[str]
    on_stage: OnStage | None = None
    checkpoint: CheckpointFile | None = None


@contextmanager
def training_view(
    task: Task | TrainingTask, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
) -> Iterator[TrainingTask]:
    """Open a task for learning, as a method sees it; when the block ends, its images cannot be read any more."""
    images = RevocableImages(task.train, task.name)
    classes = task.learned if isinstance(task, Task) else list(task.classes)
    try:
        yield TrainingTask(task.name, classes, images, list(task.train_labels), on_stage, checkpoint)
    finally:
        images.is_revoked = True


class Stream(Sequence[Task]):
    """A sequence of tasks.

    Args:
        name: The name of the benchmark.
        tasks: The tasks in order.
        about: Where the tasks come from, ready for JSON; empty for a stream that was put together by hand.
        domains: Whether a task is a domain, in which classes may return (domain-incremental learning).

    Attributes:
        classes: All classes in order of appearance.

    Raises:
        DataError: A class is in two tasks that are no domains (code "repeated-class").
    """

    def __init__(self, name: str, tasks: Sequence[Task], about: dict[str, Any] | None = None, domains: bool = False):
        self.name = name
        self.tasks = list(tasks)
        self.about = dict(about or {})
        self.domains = domains
        labels = [label for task in self.tasks for label in task.classes]
        self.classes = list(dict.fromkeys(labels))
        repeated_labels = sorted(set(labels)) if len(self.classes) < len(labels) and not domains else []
        if repeated_labels:
            repeated_labels = [label for label in repeated_labels if labels.count(label) > 1]
            message = f"stream {name!r}: {repeated_labels} are in more than one task; a class belongs to one"
            raise DataError(message, code="repeated-class", classes=repeated_labels)

    @property
    def blurry(self) -> bool:
        """True if a class may have training images in several tasks."""
        return any(task.visiting for task in self.tasks)

    @property
    def repeats_classes(self) -> bool:
        """True if a task may bring more images of known classes."""
        return self.blurry or self.domains

    def classes_until(self, i: int) -> set[str]:
        """Return all classes that had training images by the end of task i."""
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
    """Split a dataset into tasks. Images are views of the dataset's; nothing is copied.

    Args:
        benchmark: The benchmark's name and its usual number of tasks.
        dataset: The images and labels.
        options: How to split; None: as usual.

    Returns:
        The stream.

    Raises:
        DataError: The options do not fit the dataset, or a class has no images (code "class-without-images").
    """
    options = options or StreamOptions()
    group = group_domains if benchmark.domains else functools.partial(group_classes, default_tasks=benchmark.tasks)
    groups = group(dataset.classes, options)
    train_part, test_part = dataset.train, dataset.test
    train = [_limit_rows(options.train_per_class, rows, options) for rows in _rows_by_class(train_part, dataset)]
    test = _rows_by_class(test_part, dataset)
    if options.validation:
        test_part = train_part
        masks = [draw_mask(len(rows), options.validation) for rows in train]
        test = [rows[mask] for rows, mask in zip(train, masks, strict=True)]
        train = [rows[~mask] for rows, mask in zip(train, masks, strict=True)]
    test = [_limit_rows(options.test_per_class, rows, options) for rows in test]
    numbers = [[dataset.classes.index(label) for label in group] for group in groups]
    for k in (k for task_numbers in numbers[1:] for k in task_numbers):
        train[k] = _limit_rows(options.shots, train[k], options)
    _check_images(numbers, dataset.classes, {"training": train, options.judged_on: test})
    tasks, trains = [], distribute(train, numbers, options.blurry, options.disjoint, options.seed)
    for i, (task_numbers, rows) in enumerate(zip(numbers, trains, strict=True), 1):
        visiting = [k for k in range(len(rows)) if k not in task_numbers and len(rows[k])]
        train_images = _select_images(train_part, rows, [*task_numbers, *visiting], dataset)
        test_images = _select_images(test_part, test, task_numbers, dataset)
        names = [[dataset.classes[k] for k in group_numbers] for group_numbers in (task_numbers, visiting)]
        task = Task(f"task-{i}", names[0], *train_images, *test_images, names[1])
        tasks.append(_to_domain(task) if benchmark.domains else task)
    return Stream(benchmark.name, tasks, _describe(benchmark, dataset, options, tasks), benchmark.domains)


def _limit_rows(count: int | None, rows: np.ndarray, options: StreamOptions) -> np.ndarray:
    """Choose the first `count` rows of a class, or draw them; None: all. They stay in file order."""
    if count is None or options.draw is None:
        return rows[:count]
    return rows[np.sort(np.random.RandomState(options.draw).permutation(len(rows))[:count])]


def _to_domain(task: Task) -> Task:
    """Name a task after its domain, and its classes without it."""
    classes, train, test = (
        [name.partition("/")[2] for name in n] for n in (task.classes, task.train_labels, task.test_labels)
    )
    return Task(task.classes[0].partition("/")[0], classes, task.train, train, task.test, test)


def draw_mask(count: int, share: float) -> np.ndarray:
    """Draw a share of `count` rows with a fixed seed, bool [count]: at least one, but never all.

    Each class is drawn separately with the same seed, so a class's images do not depend on other classes.
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
    """Raise if a class of a task has no images; a task file may omit the other classes."""
    for group in groups:
        for kind, rows_of in parts.items():
            for k in group:
                if not len(rows_of[k]):
                    message = f"class {classes[k]!r} has no {kind} image; add images or leave the class out"
                    raise DataError(message, code="class-without-images", name=classes[k], part=kind)


def _select_images(part: Labelled, rows_of: Rows, numbers: list[int], dataset: Dataset) -> tuple[ImageSet, list[str]]:
    """Return the images of some classes in file order, and their labels."""
    rows = np.sort(np.concatenate([rows_of[k] for k in numbers]))
    return Chosen(part.images, rows.tolist()), [dataset.classes[k] for k in part.labels[rows].tolist()]


def _describe(benchmark: Benchmark, dataset: Dataset, options: StreamOptions, tasks: list[Task]) -> dict[str, Any]:
    return {
        "name": benchmark.name,
        "options": options.to_dict(),
        "judged_on": options.judged_on,
        "checksums": dict(dataset.checksums),
        "class_order": list(dict.fromkeys(label for task in tasks for label in task.classes)),
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
