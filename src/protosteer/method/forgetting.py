"""Forgetting is removal of records; what it guarantees depends on what was trained with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.errors import LearnerError
from protosteer.method.memory import Memory, TaskRecord

# The influence of the task that gave its prompt to all; one from elsewhere is no task's influence.
FOR_ALL = "the prompt for all classes was trained with its images"


@dataclass(frozen=True)
class Forgotten:
    """What was removed, and what the removal is worth."""

    classes: list[str]
    task: str
    bytes: int
    exact: bool
    guarantee: str


def forget(memory: Memory, name: str | None = None, *, task: str | None = None) -> Forgotten:
    """Remove a class, or a whole task with `task=`. The result says what that guarantees."""
    if (name is None) == (task is None):
        raise LearnerError("say what to forget: a class, forget('cat'), or a task, forget(task='spring')")
    before = memory.tasks
    if task is not None:
        owner = memory.forget_task(task)
        classes = owner.class_names
    else:
        assert name is not None
        owner = memory.forget_class(name)
        classes = [name]
    gone, put = (
        set(before) - set(memory.tasks),
        set(memory.tasks) - set(before),
    )  # of many tasks only what changed
    removed = sum(t.bytes for t in gone) - sum(t.bytes for t in put)
    remains = _influence(owner, classes, before)
    return Forgotten(classes, owner.name, removed, not remains, _guarantee(remains))


def forget_all(memory: Memory, names: Sequence[str]) -> list[Forgotten]:
    """Remove several classes, or none if one of them does not exist. Whole tasks go as tasks, the latest
    first.

    So each sentence tells of what remains when all are gone.
    """
    after = Memory(memory.tasks)
    wanted = set(names)
    for name in names:
        Memory(memory.tasks).forget_class(name)  # says that it does not exist
    outcome = []
    for task in reversed(memory.tasks):
        here = [name for name in task.class_names if name in wanted]
        if len(here) == len(task.classes):
            outcome.append(forget(after, task=task.name))
        else:
            outcome += [forget(after, name) for name in reversed(here)]
    memory.tasks = after.tasks
    return outcome[::-1]


def _influence(owner: TaskRecord, classes: list[str], tasks: Sequence[TaskRecord]) -> list[str]:
    """Prompts that were trained with the removed images, or with what was made of them, in words."""
    remains = []
    place = tasks.index(owner)
    earlier, later = tasks[:place], tasks[place + 1 :]
    if owner.prompt is not None and not owner.few_shot:
        stays = len(classes) < len(owner.classes)
        if any(_serves(owner.prompt, t) for t in (*earlier, *later, *([owner] if stays else []))):
            remains.append(FOR_ALL)
        elif stays:
            remains.append(f"the prompt of task '{owner.name}' was trained with its images")
        copies = [t.name for t in (*earlier, *later) if t.few_shot and _same_prompt(t, owner)]
        if copies:
            remains.append(f"task '{copies[0]}' uses a copy of the prompt that was trained with its images")
    # A copied prompt was trained when its original was, which may stand before the owner.
    dependent = [t for t in later if t.prompt is not None and not t.independent]
    if any(not any(_same_prompt(t, e) for e in (*earlier, owner)) for t in dependent):
        remains.append(
            "prompts of later tasks were trained against its prototypes and may start from its prompt"
        )
    return remains


def _same_prompt(a: TaskRecord, b: TaskRecord) -> bool:
    return a.prompt is not None and b.prompt is not None and torch.equal(a.prompt, b.prompt)


def _serves(prompt: Tensor, task: TaskRecord) -> bool:
    """Whether it is the prompt for all classes that the task's images were seen under."""
    return task.domain is not None and torch.equal(task.domain, prompt)


def _guarantee(remains: list[str]) -> str:
    if not remains:
        return "exact: no prompt that remains was trained with it, as if it had never been learned"
    again = "what remains again, in a new model" if FOR_ALL in remains else "those tasks again without it"
    return (
        "its prototypes are gone and it can no longer be predicted, but influence remains: "
        + " and ".join(remains)
        + f"; to remove that too, learn {again}"
    )
