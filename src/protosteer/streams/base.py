"""A benchmark is a sequence of tasks; a task brings classes that no other task has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from protosteer.data.images import ImageSet
from protosteer.errors import DataError


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
    """Tasks in the order in which they are met; `classes` in order of appearance."""

    def __init__(self, name: str, tasks: Sequence[Task]):
        self.name = name
        self.tasks = list(tasks)
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
