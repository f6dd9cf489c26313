"""Merging is concatenation of records: the tasks of several models in one list."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from protosteer.errors import LearnerError
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord

Renames = Mapping[str, str]  # old name to new


def concatenate(
    memories: Sequence[Memory], renames: Renames | None = None, task_renames: Renames | None = None
) -> Memory:
    """Return the tasks of all memories, in the order given. A class of several memories has records of all.

    A correction of the same image is taken once. Renames apply to every memory but the first. A `LearnerError` names
    what is there twice, or a rename that does not apply.
    """
    renames, task_renames = renames or {}, task_renames or {}
    _check_renames(memories[1:], renames, task_renames)
    memory = Memory(memories[0].tasks)
    for task in (task for memory in memories[1:] for task in memory.tasks):
        name = task_renames.get(task.name, task.name)
        record = dataclasses.replace(task, name=name, classes=task.classes.renamed(renames))
        if record.compacted:
            record = dataclasses.replace(record, name=memory.free_name(record.name))
        if record.corrected_from is None or record.name not in memory.task_names:
            _check_new(memory, record)
            memory.add(record)
    return memory


def _check_new(memory: Memory, task: TaskRecord) -> None:
    if task.name in memory.task_names:
        message = f"two tasks are named '{task.name}'; give the later one another name with task_renames="
        raise LearnerError(message, code="task-exists", name=task.name)
    for name, times in Counter(task.class_names).items():
        if times > 1:
            message = f"two classes of task '{task.name}' would be named '{name}'; rename one of them"
            raise LearnerError(message, code="class-exists", task=task.name, name=name)


def _check_renames(memories: Sequence[Memory], renames: Renames, task_renames: Renames) -> None:
    for kind, mapping, names in (
        ("class", renames, {name for memory in memories for name in memory.classes}),
        ("task", task_renames, {name for memory in memories for name in memory.task_names}),
    ):
        for name in mapping:
            if name not in names:
                message = f"no {kind} named '{name}' in what is merged into the first; nothing to rename"
                raise LearnerError(message, code=f"unknown-{kind}", name=name)
