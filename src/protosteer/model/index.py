"""All records of a memory as numbers, prompts and matrices, ready for inference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.paper.inference import PrototypeIndex
from protosteer.paper.prompts import trunk_layers


@dataclass(frozen=True)
class Index:
    """Names, prompts and owners of all records; prototypes are gathered on first use.

    Prompts have the numbers of their tasks; the shared prompt, if there is one, comes last.
    """

    tasks: list[str]
    classes: list[str]
    prompts: list[Tensor | None]  # [S, L, D] each
    prompted: Tensor  # bool [T]
    prompt_owners: Tensor  # [T]: the first task that has the same prompt
    record_classes: Tensor  # [R]: a class may have records in several tasks
    record_tasks: Tensor  # [R]
    table: ClassTable

    @classmethod
    def build(cls, memory: Memory) -> Index:
        """Index the records of a memory."""
        tasks, shared = memory.tasks, memory.shared_prompt
        return cls(
            tasks=memory.task_names,
            classes=memory.classes,
            prompts=[*(task.prompt for task in tasks), *([] if shared is None else [shared])],
            prompted=torch.tensor([task.prompt is not None for task in tasks]),
            prompt_owners=_prompt_owners(tasks),
            record_classes=memory.record_classes,
            record_tasks=memory.record_tasks,
            table=memory.table,
        )

    @cached_property
    def prototypes(self) -> PrototypeIndex:
        """Prototypes in the form that CPP inference reads."""
        return PrototypeIndex(
            keys=F.normalize(self.table.keys, dim=1),
            key_tasks=self.record_tasks.repeat_interleave(self.table.key_lengths),
            values=self.values,
            value_classes=self.value_classes,
            prompt_tasks=torch.where(self.prompted, self.prompt_owners, -1),
            num_classes=len(self.classes),
        )

    @cached_property
    def class_tasks(self) -> Tensor:
        """[C]: the task that each class was first learned in."""
        tasks = torch.full((len(self.classes),), len(self.tasks))
        return tasks.scatter_reduce_(0, self.record_classes, self.record_tasks, "amin")

    @cached_property
    def class_task_mask(self) -> Tensor:
        """[C, T]: whether a task has a record of a class."""
        mask = torch.zeros(len(self.classes), len(self.tasks), dtype=torch.bool)
        mask[self.record_classes, self.record_tasks] = True
        return mask

    @cached_property
    def values(self) -> Tensor:
        """[V, D]: value prototypes as unit vectors."""
        return F.normalize(self.table.values.means, dim=1)

    @cached_property
    def value_records(self) -> Tensor:
        """[V]: the record of each value prototype, ascending."""
        return torch.arange(len(self.record_classes)).repeat_interleave(self.table.lengths("values"))

    @cached_property
    def value_classes(self) -> Tensor:
        """[V]: the class of each value prototype."""
        return self.record_classes[self.value_records]

    @cached_property
    def value_tasks(self) -> Tensor:
        """[V]: the task of each value prototype, ascending."""
        return self.record_tasks[self.value_records]

    def shared_layers(self, depth: int) -> int:
        """Return how many first layers no prompt enters."""
        return trunk_layers(self.prompts, depth)


def _prompt_owners(tasks: Sequence[TaskRecord]) -> Tensor:
    """Return for each task the first one with an equal prompt, [T], so that no copy runs twice."""
    owners = list(range(len(tasks)))
    if any(task.few_shot for task in tasks):
        owners_by_digest: dict[bytes, int] = {}
        for t, task in enumerate(tasks):
            if task.prompt is not None:
                content = str(list(task.prompt.shape)).encode() + task.prompt.contiguous().numpy().tobytes()
                owners[t] = owners_by_digest.setdefault(hashlib.sha256(content).digest(), t)
    return torch.tensor(owners)
