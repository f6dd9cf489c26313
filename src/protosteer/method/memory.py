"""What has been learned, as data: one record per task, and the list operations on records.

No record refers to another task's numbers, so that resuming, merging and forgetting are list operations.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from protosteer.errors import LearnerError
from protosteer.method.prototypes import Centroids, Prototypes, Sketch
from protosteer.util.text import listed


@dataclass(frozen=True, eq=False)
class ClassRecord:
    """A class in one task: key centroids (no prompt) and value centroids (its task's prompt), raw, not
    normalised.

    A class that is read as evidence (`evidence.py`) has sketches too; the points of the plain one are its
    keys.
    """

    name: str
    keys: Tensor  # [c, D]
    values: Centroids
    similarities: Tensor | None = None  # [h]: of images that were not learned; see photos/rejection.py
    plain: Sketch | None = None  # no prompt
    domain: Sketch | None = None  # the prompt for all classes
    seen: Tensor | None = None  # int64 [s]: digests of files that were learned or held out; photos/again.py

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


class LazyClasses(Sequence[ClassRecord]):
    """Records that are made when one of them is looked at; their names are known before."""

    def __init__(self, names: Sequence[str]):
        self.names = names
        self._records: tuple[ClassRecord, ...] | None = None

    @property
    def made(self) -> bool:
        return self._records is not None

    @abstractmethod
    def make(self) -> tuple[ClassRecord, ...]: ...

    @property
    @abstractmethod
    def evidence(self) -> bool:
        """Whether all of them have a sketch without a prompt."""

    @overload
    def __getitem__(self, place: int) -> ClassRecord: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[ClassRecord, ...]: ...

    def __getitem__(self, place: int | slice) -> ClassRecord | tuple[ClassRecord, ...]:
        if self._records is None:
            self._records = self.make()
        return self._records[place]

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class About:
    """Where a task's record comes from. No prediction depends on it; what is not known is None."""

    settings: Mapping[str, Any] | None = None
    images: int | None = None  # that were learned
    key_spread: float | None = None  # mean cosine of the embeddings to their common mean
    value_spread: float | None = None
    loss: float | None = None  # of the last epoch
    accuracy: float | None = None  # percent of its images nearest to their own class mean
    trained_parameters: int | None = None
    learned: str | None = None  # date, ISO
    image_bytes: int | None = None  # of the files that were learned
    held_out: int | None = None  # images that were not learned but checked the result
    file: str | None = None  # the name of the only one that was learned
    unfinished: bool | None = None  # can be used, but its prompt was still to be trained

    def to_dict(self) -> dict[str, Any]:
        """For files: plain data, without what is not known."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> About:
        """From a file; what this version does not know is left out, what has another type is refused."""
        kinds = {
            "settings": dict,
            "learned": str,
            "images": int,
            "image_bytes": int,
            "held_out": int,
            "file": str,
        }
        kinds |= {"trained_parameters": int, "unfinished": bool}
        known = {f.name: values[f.name] for f in dataclasses.fields(cls) if values.get(f.name) is not None}
        for name, value in known.items():
            kind = kinds.get(name, (int, float))
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"task {name} is {value!r}")
        return cls(**known)


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """Everything kept of one task. `prompt` is None for the training-free baseline."""

    name: str
    classes: Sequence[ClassRecord]
    prompt: Tensor | None
    independent: bool = False  # no other task had a say in training its prompt, or there is none
    about: About = About()
    few_shot: bool = False  # nothing was trained: the prompt, if any, is a copy of the nearest task's
    domain: Tensor | None = None  # the prompt for all classes, under which its domain sketches were made
    corrected: str | None = None  # of one image that was taken for this class, wrongly

    @property
    def class_names(self) -> list[str]:
        if isinstance(self.classes, LazyClasses):
            return list(self.classes.names)
        return [record.name for record in self.classes]

    @property
    def evidence(self) -> bool:
        """Whether each of its classes can be read as evidence."""
        if isinstance(self.classes, LazyClasses):
            return self.classes.evidence
        return all(record.plain is not None for record in self.classes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, packed, with names that are unique within the task, but for the prompt for all classes."""
        if self.prompt is not None:
            yield "prompt", self.prompt
        for i, record in enumerate(self.classes):
            parts = {"values": record.values, "plain": record.plain, "domain": record.domain}
            if record.plain is None:
                yield f"classes.{i}.keys", record.keys
            for name, part in parts.items():
                for field, tensor in part.packed().items() if part is not None else ():
                    yield f"classes.{i}.{name}.{field}", tensor
            if record.similarities is not None:
                yield f"classes.{i}.held_out", record.similarities
            if record.seen is not None:
                yield f"classes.{i}.seen", record.seen

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors())


def correction_name(digest: int) -> str:
    """Of the task that is a correction of an image, by what tells the image from others."""
    return f"correction-{digest % 2**64:016x}"


class Memory:
    """An ordered list of task records whose names are unique. A class may have records in several tasks."""

    def __init__(self, tasks: Iterable[TaskRecord] = ()):
        self.tasks: tuple[TaskRecord, ...] = tuple(tasks)
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
    def records(self) -> list[ClassRecord]:
        """Of all tasks, one after the other."""
        return [record for task in self.tasks for record in task.classes]

    @property
    def record_classes(self) -> Tensor:
        """[R]: the class of each record, as its place in `classes`."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([numbers[name] for task in self.tasks for name in task.class_names])

    @property
    def record_tasks(self) -> Tensor:
        """[R]: the task of each record, as its place."""
        return torch.arange(len(self)).repeat_interleave(torch.tensor([len(t.classes) for t in self.tasks]))

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]

    @property
    def corrections(self) -> list[TaskRecord]:
        """In the order in which they were made."""
        return [task for task in self.tasks if task.corrected is not None]

    @property
    def evidence(self) -> bool:
        """Whether every class can be read as evidence; where one cannot, all are read as the paper reads."""
        return bool(self.tasks) and all(task.evidence for task in self.tasks)

    @property
    def domain(self) -> Tensor | None:
        """The prompt for all classes, if they have one in common."""
        first = self.tasks[0].domain if self.tasks else None
        if first is None:
            return None
        same = (task.domain is not None and torch.equal(task.domain, first) for task in self.tasks)
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
        rest = tuple(record for record in task.classes if record.name not in gone)
        self.replace(task, dataclasses.replace(task, classes=rest))

    def replace(self, old: TaskRecord, new: TaskRecord) -> None:
        """Put a record in the place of another."""
        self.tasks = Memory(new if task is old else task for task in self.tasks).tasks

    def prototypes(self, noise: str, without: Iterable[str] = ()) -> Prototypes | None:
        """Value centroids of all classes but some with their noise scale, for training the next task.

        noise: "cluster", the deviations within each centroid's group; "class", the variance of the class, one
        number; "none".
        """
        left_out = set(without)
        records = [record for record in self.records if record.name not in left_out]
        if not records:
            return None
        means = torch.cat([record.values.means for record in records])
        sizes = torch.tensor([len(record.values.means) for record in records])
        if noise == "cluster":
            scales = torch.cat([record.values.deviations for record in records])
        else:
            per_class = [record.variance if noise == "class" else 0.0 for record in records]
            scales = torch.tensor(per_class).repeat_interleave(sizes)[:, None]
        numbers: dict[str, int] = {}
        labels = torch.tensor([numbers.setdefault(record.name, len(numbers)) for record in records])
        return Prototypes(means, scales, labels.repeat_interleave(sizes))
