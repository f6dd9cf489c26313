"""Merging is concatenation of records: what several models know, in one list."""

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
    """The tasks of all, in the order given; no task name twice. A class that several know has records of all.

    Renames are for names that clash, or that are the same by chance: they apply to every memory but the first.
    """
    renames, task_renames = renames or {}, task_renames or {}
    _check_renames(memories[1:], renames, task_renames)
    merged = Memory(memories[0].tasks)
    for memory in memories[1:]:
        for task in memory.tasks:
            new = _renamed(task, renames, task_renames)
            if new.corrected_from is not None and new.name in merged.task_names:
                continue  # the same image, in two models
            _check_new(merged, new)
            merged.add(new)
    return merged


def _renamed(task: TaskRecord, renames: Renames, task_renames: Renames) -> TaskRecord:
    names = tuple(renames.get(name, name) for name in task.classes.names)
    classes = dataclasses.replace(task.classes, names=names)
    return dataclasses.replace(task, name=task_renames.get(task.name, task.name), classes=classes)


def _check_new(merged: Memory, task: TaskRecord) -> None:
    if task.name in merged.task_names:
        raise LearnerError(
            f"two tasks are named '{task.name}'; give the later one another name with task_renames="
        )
    for name, times in Counter(task.class_names).items():
        if times > 1:
            raise LearnerError(
                f"two classes of task '{task.name}' would be named '{name}'; rename one of them",
                code="duplicate-class",
                task=task.name,
                name=name,
            )


def _check_renames(later: Sequence[Memory], renames: Renames, task_renames: Renames) -> None:
    for kind, asked, known in (
        ("class", renames, {name for memory in later for name in memory.classes}),
        ("task", task_renames, {name for memory in later for name in memory.task_names}),
    ):
        for old in asked:
            if old not in known:
                raise LearnerError(
                    f"no {kind} named '{old}' in what is merged into the first; nothing to rename"
                )
