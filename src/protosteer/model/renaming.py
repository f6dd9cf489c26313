"""Rename a class, or join several: list operations on records, which stay as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from protosteer.errors import LearnerError
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.util.text import check_name


def rename(memory: Memory, old: str, new: str) -> None:
    """Give a class another name in all its tasks.

    Raises:
        LearnerError: There is no such class, or the new name is taken.
        DataError: The new name cannot be used.
    """
    memory.tasks_of(old)  # raises if there is none
    if new in memory.classes:
        message = f"a class named '{new}' exists already; to make one class of both, join them"
        raise LearnerError(message, code="class-exists", name=new)
    join(memory, [old], new)


def join(memory: Memory, names: Sequence[str], new: str) -> None:
    """Make one class of several: their records get one name, as if it had been learned in several tasks.

    A class has one record in a task. If a task has several of the classes, each but the first moves into a task of its
    own, with the same prompts.

    Raises:
        LearnerError: A class does not exist, or the name belongs to a class that is not joined.
        DataError: The new name cannot be used.
    """
    check_name(new, "the class")
    for name in names:
        memory.tasks_of(name)  # raises if there is none
    if new in memory.classes and new not in names:
        message = f"a class named '{new}' exists already; name it among those to join, or choose another name"
        raise LearnerError(message, code="class-exists", name=new)
    renames = dict.fromkeys(names, new)
    tasks: list[TaskRecord] = []
    task_names: list[str] = []
    for task in memory.tasks:
        own_names = [name for name in task.class_names if name in renames]
        classes = task.classes.without(own_names[1:]).renamed(renames) if own_names else task.classes
        tasks.append(dataclasses.replace(task, classes=classes) if own_names else task)
        for name in own_names[1:]:
            task_names.append(memory.free_name(task.name, task_names))
            classes = task.classes.take([task.class_names.index(name)]).renamed(renames)
            tasks.append(dataclasses.replace(task, name=task_names[-1], classes=classes))
    memory.tasks = Memory(tasks).tasks
