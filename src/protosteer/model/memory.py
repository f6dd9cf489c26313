"""What has been learned: one record per task, and list operations on records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from protosteer.errors import LearnerError
from protosteer.model.class_table import ClassTable
from protosteer.model.records import ClassRecord, TaskRecord, equal_prompts
from protosteer.paper.prototypes import Anchors, Centroids
from protosteer.util.text import listed

_NO_TASKS: tuple[tuple[TaskRecord, ...], ClassTable] = (), ClassTable((), {}, {})


class Memory:
    """An ordered list of task records with unique names. A class may have records in several tasks."""

    def __init__(self, tasks: Iterable[TaskRecord] = ()):
        """Hold tasks; a `LearnerError` names a task that occurs twice."""
        self.tasks: tuple[TaskRecord, ...] = tuple(tasks)
        self._joined = _NO_TASKS  # the tasks of the cached `table`, and the table
        if len({*self.task_names}) < len(self.task_names):
            all_tasks, self.tasks = self.tasks, ()
            for task in all_tasks:
                self.add(task)  # names the one that is there already

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def classes(self) -> list[str]:
        """Names of all classes, in the order in which they were learned first."""
        return list(dict.fromkeys(name for task in self.tasks for name in task.classes.names))

    @property
    def table(self) -> ClassTable:
        """The classes of all tasks, one after the other; a class of several tasks has several rows.

        The table is cached; tasks that were added since are joined to the cached table.
        """
        if self._joined[0] is not self.tasks:
            tasks, table = self._joined if self._joined[0] == self.tasks[: len(self._joined[0])] else _NO_TASKS
            parts = (task.classes for task in self.tasks[len(tasks) :])
            self._joined = self.tasks, ClassTable.concatenate([table, *parts])
        return self._joined[1]

    @property
    def records(self) -> list[ClassRecord]:
        """The same as single records; for many classes, use `table`."""
        return list(self.table)

    @property
    def record_classes(self) -> Tensor:
        """[R]: the class of each row of `table`, as its position in `classes`."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([numbers[name] for task in self.tasks for name in task.classes.names])

    @property
    def record_tasks(self) -> Tensor:
        """[R]: the task of each row of `table`, as its position in `tasks`."""
        lengths = torch.tensor([len(task.classes) for task in self.tasks], dtype=torch.int64)
        return torch.arange(len(self)).repeat_interleave(lengths)

    @property
    def task_names(self) -> list[str]:
        """Names of all tasks, in order."""
        return [task.name for task in self.tasks]

    @property
    def corrections(self) -> list[TaskRecord]:
        """Tasks that are corrections, the oldest first."""
        return [task for task in self.tasks if task.corrected_from is not None]

    @property
    def evidence(self) -> bool:
        """Whether the default classifier can read every class; if not, CPP inference reads all of them."""
        return bool(self.tasks) and self.table.summarised

    @property
    def shared_prompt(self) -> Tensor | None:
        """The shared prompt [S, L, D] if all tasks have the same one."""
        prompt = self.tasks[0].shared_prompt if self.tasks else None
        other_prompts = (task.shared_prompt for task in self.tasks if task.shared_prompt is not prompt)
        return prompt if all(equal_prompts(p, prompt) for p in other_prompts) else None

    @property
    def owners(self) -> dict[str, list[str]]:
        """The tasks that each class was learned in, the first one first."""
        tasks_by_class: dict[str, list[str]] = {}
        for task in self.tasks:
            for name in task.classes.names:
                tasks_by_class.setdefault(name, []).append(task.name)
        return tasks_by_class

    def check_new(self, task_name: str) -> None:
        """Raise a LearnerError if a task of that name exists."""
        if task_name in self.task_names:
            message = f"a task named '{task_name}' exists already; choose another name or forget it first"
            raise LearnerError(message, code="task-exists", name=task_name)

    def free_name(self, wish: str, names: Sequence[str] = ()) -> str:
        """Return a name that no task has: the wish itself, or with a number. `names` are other names to avoid."""
        name, number = wish, 2
        while name in self.task_names or name in names:
            name, number = f"{wish}-{number}", number + 1
        return name

    def add(self, task: TaskRecord) -> None:
        """Append a task; its name must be new."""
        self.check_new(task.name)
        self.tasks = (*self.tasks, task)

    def copy(self) -> Memory:
        """Return an independent memory with the same records and cached table."""
        memory = Memory(self.tasks)
        memory._joined = self._joined
        return memory

    def with_task(self, task: TaskRecord) -> Memory:
        """Return a memory with one more task, whose name must be new."""
        memory = self.copy()
        memory.add(task)
        return memory

    def task(self, name: str) -> TaskRecord:
        """Return the task of that name."""
        if name not in self.task_names:
            message = f"no task named '{name}'; there are: {listed(self.task_names)}"
            raise LearnerError(message, code="unknown-task", name=name, known=self.task_names)
        return self.tasks[self.task_names.index(name)]

    def tasks_of(self, name: str) -> list[TaskRecord]:
        """Return the tasks that have a record of a class."""
        owners = [task for task in self.tasks if name in task.classes.names]
        if not owners:
            message = f"no class named '{name}'; there are: {listed(self.classes)}"
            raise LearnerError(message, code="unknown-class", name=name, known=self.classes)
        return owners

    def remove(self, task: TaskRecord, classes: Iterable[str] | None = None) -> None:
        """Remove a task, or some of its classes; a task that loses its last class is removed, too."""
        names = set(task.class_names if classes is None else classes)
        if names >= {*task.class_names}:
            self.tasks = tuple(t for t in self.tasks if t is not task)
            return
        self.replace(task, dataclasses.replace(task, classes=task.classes.without(names)))

    def replace(self, task: TaskRecord, record: TaskRecord) -> None:
        """Put a record in the place of a task."""
        self.tasks = Memory(record if t is task else t for t in self.tasks).tasks

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
