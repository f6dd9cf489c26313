"""What has been learned, as data: one record per task, and the list operations on records.

No record refers to another task's numbers, so that resuming, merging and forgetting are list operations.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from protosteer.errors import LearnerError
from protosteer.method.anchors import Anchors
from protosteer.method.prototypes import Centroids
from protosteer.method.vit import shared_layers
from protosteer.util.text import listed


@dataclass(frozen=True, eq=False)
class ClassRecord:
    """A class: key centroids (no prompt) and value centroids (its task's prompt), raw, not normalised."""

    name: str
    keys: Tensor  # [c, D]
    values: Centroids
    held_out: Tensor | None = None  # [h]: similarities of images that were not learned, see rejection.py

    @property
    def images(self) -> int:
        return int(self.values.counts.sum())

    @property
    def variance(self) -> float:
        """Variance of the class's value embeddings, averaged over dimensions: within plus between groups."""
        weights = (self.values.counts / self.values.counts.sum())[:, None]
        mean = (weights * self.values.means).sum(dim=0)
        squares = self.values.deviations**2 + (self.values.means - mean) ** 2
        return float((weights * squares).sum(dim=0).mean())


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """Everything kept of one task. `prompt` is None for the training-free baseline."""

    name: str
    classes: tuple[ClassRecord, ...]
    prompt: Tensor | None
    independent: bool = False  # no other task had a say in training its prompt, or there is none
    about: dict[str, Any] = field(default_factory=dict)  # provenance: settings, dates, training history
    few_shot: bool = False  # nothing was trained: the prompt, if any, is a copy of the nearest task's

    @property
    def class_names(self) -> list[str]:
        return [record.name for record in self.classes]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with names that are unique within the task."""
        if self.prompt is not None:
            yield "prompt", self.prompt
        for i, record in enumerate(self.classes):
            yield f"classes.{i}.keys", record.keys
            for part in dataclasses.fields(record.values):
                yield f"classes.{i}.values.{part.name}", getattr(record.values, part.name)
            if record.held_out is not None:
                yield f"classes.{i}.held_out", record.held_out

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors())


class Memory:
    """An ordered list of task records whose class names and task names are unique."""

    def __init__(self, tasks: Iterable[TaskRecord] = ()):
        self.tasks: tuple[TaskRecord, ...] = tuple(tasks)
        if len({*self.task_names}) < len(self.task_names) or len({*self.classes}) < len(self.classes):
            listed, self.tasks = self.tasks, ()
            for task in listed:
                self.add(task)  # says which of them is there already

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def classes(self) -> list[str]:
        return [name for task in self.tasks for name in task.class_names]

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]

    def check_new(self, task_name: str, classes: Iterable[str]) -> None:
        """Refuse a task or class that exists already, before anything is spent on it."""
        if task_name in self.task_names:
            raise LearnerError(
                f"a task named '{task_name}' exists already; give another name or forget it first"
            )
        known = {name: task.name for task in self.tasks for name in task.class_names}
        for name in classes:
            if name in known:
                raise LearnerError(
                    f"class '{name}' was learned in task '{known[name]}'; forget it first, or rename it"
                )

    def free_name(self, wish: str) -> str:
        """A name for a task that no task has: the wish itself, or with a number."""
        name, number = wish, 2
        while name in self.task_names:
            name, number = f"{wish}-{number}", number + 1
        return name

    def add(self, task: TaskRecord) -> None:
        self.check_new(task.name, task.class_names)
        self.tasks = (*self.tasks, task)

    def forget_task(self, name: str) -> TaskRecord:
        if name not in self.task_names:
            raise LearnerError(f"no task named '{name}'; there are: {listed(self.task_names)}")
        removed = self.tasks[self.task_names.index(name)]
        self.tasks = tuple(task for task in self.tasks if task is not removed)
        return removed

    def forget_class(self, name: str) -> TaskRecord:
        """Remove a class; a task that has no other goes with it. Returns the task as it was."""
        if name not in self.classes:
            raise LearnerError(f"no class named '{name}'; there are: {listed(self.classes)}")
        owner = next(task for task in self.tasks if name in task.class_names)
        if len(owner.classes) == 1:
            return self.forget_task(owner.name)
        rest = tuple(record for record in owner.classes if record.name != name)
        smaller = dataclasses.replace(owner, classes=rest)
        self.tasks = tuple(smaller if task is owner else task for task in self.tasks)
        return owner

    def replace(self, old: TaskRecord, new: TaskRecord) -> None:
        """Put a record in the place of another."""
        changed = Memory(new if task is old else task for task in self.tasks)
        self.tasks = changed.tasks

    def shared_layers(self, depth: int) -> int:
        """Layers that no task's prompt touches: one run of them serves the query and every prompt."""
        return min((shared_layers(t.prompt, depth) for t in self.tasks if t.prompt is not None), default=0)

    def prompts(self, tasks: Tensor) -> Tensor:
        """[m, S, L, D]: the prompts of tasks by their numbers [m]; all of one shape."""
        return torch.stack([self.tasks[t].prompt for t in tasks.tolist()])

    def alike(self, tasks: Tensor) -> list[Tensor]:
        """Places in a list of tasks by their numbers [m], grouped so that the prompts of a group have one shape."""
        groups: dict[torch.Size, list[int]] = {}
        for t in tasks.unique().tolist():
            prompt = self.tasks[t].prompt
            assert prompt is not None
            groups.setdefault(prompt.shape, []).append(t)
        return [torch.isin(tasks, torch.tensor(group)).nonzero()[:, 0] for group in groups.values()]

    def prompt_owners(self) -> Tensor:
        """[T]: for each task the first that has the very same prompt, so that copies are not run twice."""
        owners = list(range(len(self.tasks)))
        if any(task.few_shot for task in self.tasks):
            first: dict[bytes, int] = {}
            for t, task in enumerate(self.tasks):
                if task.prompt is not None:
                    content = (
                        str(list(task.prompt.shape)).encode() + task.prompt.contiguous().numpy().tobytes()
                    )
                    owners[t] = first.setdefault(hashlib.sha256(content).digest(), t)
        return torch.tensor(owners)

    def anchors(self, noise: str) -> Anchors | None:
        """Value centroids of all classes with their noise scale, for training the next task."""
        records = [record for task in self.tasks for record in task.classes]
        if not records:
            return None
        means = torch.cat([record.values.means for record in records])
        sizes = torch.tensor([len(record.values.means) for record in records])
        if noise == "cluster":
            scales = torch.cat([record.values.deviations for record in records])
        else:
            per_class = [record.variance if noise == "class" else 0.0 for record in records]
            scales = torch.tensor(per_class).repeat_interleave(sizes)[:, None]
        return Anchors(means, scales, torch.arange(len(records)).repeat_interleave(sizes))
