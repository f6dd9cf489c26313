"""What has been learned: one record per task, and the list operations on records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from protosteer.errors import LearnerError
from protosteer.model.class_table import ClassTable
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Anchors, Centroids
from protosteer.util.text import listed


class Memory:
    """An ordered list of task records whose names are unique. A class may have records in several tasks."""

    def __init__(self, tasks: Iterable[TaskRecord] = ()):
        self.tasks: tuple[TaskRecord, ...] = tuple(tasks)
        self._joined: tuple[tuple[TaskRecord, ...], ClassTable] | None = None
        if len({*self.task_names}) < len(self.task_names):
            given, self.tasks = self.tasks, ()
            for task in given:
                self.add(task)  # says which of them is there already

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def classes(self) -> list[str]:
        """In the order in which they were learned first."""
        return list(dict.fromkeys(name for task in self.tasks for name in task.class_names))

    @property
    def table(self) -> ClassTable:
        """Return the classes of all tasks, one after the other; a class of several tasks has several rows."""
        if self._joined is None or self._joined[0] is not self.tasks:
            self._joined = self.tasks, ClassTable.concatenate([task.classes for task in self.tasks])
        return self._joined[1]

    @property
    def records(self) -> list[ClassRecord]:
        """Of all tasks, one after the other."""
        return [record for task in self.tasks for record in task.classes]

    @property
    def record_classes(self) -> Tensor:
        """[R]: the class of each record, as its place in `classes`."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([numbers[name] for task in self.tasks for name in task.classes.names])

    @property
    def record_tasks(self) -> Tensor:
        """[R]: the task of each record, as its place."""
        return torch.arange(len(self)).repeat_interleave(
            torch.tensor([len(t.classes) for t in self.tasks], dtype=torch.int64)
        )

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]

    @property
    def corrections(self) -> list[TaskRecord]:
        """In the order in which they were made."""
        return [task for task in self.tasks if task.corrected_from is not None]

    @property
    def evidence(self) -> bool:
        """Whether every class can be read as evidence; where one cannot, all are read as the paper reads."""
        return bool(self.tasks) and all(task.classes.summarised for task in self.tasks)

    @property
    def shared_prompt(self) -> Tensor | None:
        """Return the shared prompt [S, L, D] if all tasks have the same one."""
        first = self.tasks[0].shared_prompt if self.tasks else None
        if first is None:
            return None
        same = (
            task.shared_prompt is not None and torch.equal(task.shared_prompt, first) for task in self.tasks
        )
        return first if all(same) else None

    @property
    def owners(self) -> dict[str, list[str]]:
        """The names of the tasks that each class was learned in, the first of them first."""
        found: dict[str, list[str]] = {}
        for task in self.tasks:
            for name in task.class_names:
                found.setdefault(name, []).append(task.name)
        return found

    def check_new(self, task_name: str) -> None:
        """Refuse a task that exists already, before anything is spent on it."""
        if task_name in self.task_names:
            raise LearnerError(
                f"a task named '{task_name}' exists already; give another name or forget it first"
            )

    def free_name(self, wish: str, taken: Sequence[str] = ()) -> str:
        """A name for a task that no task has: the wish itself, or with a number. taken: other names not to give."""
        name, number = wish, 2
        while name in self.task_names or name in taken:
            name, number = f"{wish}-{number}", number + 1
        return name

    def add(self, task: TaskRecord) -> None:
        self.check_new(task.name)
        self.tasks = (*self.tasks, task)

    def task(self, name: str) -> TaskRecord:
        if name not in self.task_names:
            raise LearnerError(f"no task named '{name}'; there are: {listed(self.task_names)}")
        return self.tasks[self.task_names.index(name)]

    def tasks_of(self, name: str) -> list[TaskRecord]:
        """Those that have a record of a class."""
        owners = [task for task in self.tasks if name in task.class_names]
        if not owners:
            raise LearnerError(f"no class named '{name}'; there are: {listed(self.classes)}")
        return owners

    def remove(self, task: TaskRecord, classes: Iterable[str] | None = None) -> None:
        """Remove a task, or its records of some classes alone; a task that has no others goes with them."""
        gone = set(task.class_names if classes is None else classes)
        if gone >= {*task.class_names}:
            self.tasks = tuple(other for other in self.tasks if other is not task)
            return
        self.replace(task, dataclasses.replace(task, classes=task.classes.without(gone)))

    def replace(self, old: TaskRecord, new: TaskRecord) -> None:
        """Put a record in the place of another."""
        self.tasks = Memory(new if task is old else task for task in self.tasks).tasks

    def anchors(self, noise: str, without: Iterable[str] = ()) -> Anchors | None:
        """Collect the value prototypes of all classes but some, for training the next task: see `Anchors.of`."""
        table = self.table.without(without)
        if not len(table):
            return None
        numbers: dict[str, int] = {}
        labels = [numbers.setdefault(name, len(numbers)) for name in table.names]
        lengths = table.lengths("values").tolist()
        groups = zip(*(column.split(lengths) for column in vars(table.values).values()), strict=True)
        return Anchors.of([Centroids(*group) for group in groups], labels, noise)
