"""Forgetting removes records; what that guarantees depends on the prompts that were trained with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protosteer.errors import LearnerError
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord, equal_prompts
from protosteer.util.text import listed

# Influence of the task whose prompt became the shared one; a prompt from `adapt` is no task's influence.
SHARED = "the shared prompt was trained with its images"


@dataclass(frozen=True)
class Forgotten:
    """What was removed, and what that guarantees."""

    classes: list[str]
    tasks: list[str]  # that they were removed from
    bytes: int
    exact: bool  # the model is as if they had never been learned
    guarantee: str  # a sentence for the user


def forget(memory: Memory, name: str | None = None, *, task: str | None = None) -> Forgotten:
    """Remove a class from all its tasks, or a whole task, from the memory; return what that guarantees."""
    if (name is None) == (task is None):
        message = "say what to forget: a class, forget('cat'), or a task, forget(task='spring')"
        raise LearnerError(message, code="nothing-to-forget")
    if task is not None:
        owner = memory.task(task)
        return _remove(memory, [owner], owner.class_names)
    assert name is not None
    return _remove(memory, memory.tasks_of(name), [name])


def _remove(memory: Memory, owners: Sequence[TaskRecord], classes: list[str]) -> Forgotten:
    old_tasks = memory.tasks
    for owner in owners:
        memory.remove(owner, classes)
    removals, additions = {*old_tasks} - {*memory.tasks}, {*memory.tasks} - {*old_tasks}  # of many tasks only changes
    num_bytes = sum(t.bytes for t in removals) - sum(t.bytes for t in additions)
    influence = [sentence for owner in owners for sentence in _influence(owner, owners, classes, old_tasks)]
    remains = list(dict.fromkeys(influence))
    return Forgotten(classes, [owner.name for owner in owners], num_bytes, not remains, _guarantee(remains))


def forget_all(memory: Memory, names: Sequence[str]) -> list[Forgotten]:
    """Remove several classes, or none of them if one does not exist.

    Whole tasks are removed as tasks, the latest first, so that each guarantee is about what remains in the end.
    """
    copy = Memory(memory.tasks)
    all_names = set(names)
    for name in names:
        memory.tasks_of(name)  # raises if there is none
    outcome = []
    for task in reversed(memory.tasks):
        class_names = [name for name in task.class_names if name in all_names]
        groups = [class_names] if len(class_names) == len(task.classes) else [[name] for name in reversed(class_names)]
        outcome += [_remove(copy, [copy.task(task.name)], classes) for classes in groups]
    memory.tasks = copy.tasks
    return outcome[::-1]


def lost_influence(record: TaskRecord, earlier_tasks: Sequence[TaskRecord], memory: Memory) -> str | None:
    """Return a warning if a new task, trained after `before`, has influence of classes forgotten meanwhile; else None."""
    class_names = set(memory.classes)
    for owner in earlier_tasks:
        lost = [name for name in owner.class_names if name not in class_names]
        if lost and _influence(owner, [owner], owner.class_names, (owner, record)):
            return (
                f"'{lost[0]}' was forgotten meanwhile, but task '{record.name}' has a prompt that was trained with or "
                "against it; to remove that too, forget this task and learn it again"
            )
    return None


def undo(memory: Memory, task: str | None = None) -> TaskRecord:
    """Remove the last correction, or the one of that name, as if it had never been made, and return its record."""
    corrections = {record.name: record for record in memory.corrections}
    if not corrections:
        raise LearnerError("nothing has been corrected; there is nothing to undo", code="nothing-corrected")
    if task is not None and task not in corrections:
        message = f"no correction is named '{task}'; there are: {listed(list(corrections))}"
        raise LearnerError(message, code="unknown-correction", name=task)
    record = corrections[task] if task is not None else memory.corrections[-1]
    memory.remove(record)
    return record


def _influence(
    owner: TaskRecord, owners: Sequence[TaskRecord], classes: list[str], tasks: Sequence[TaskRecord]
) -> list[str]:
    """Return sentences on the remaining prompts that were trained with the removed images or their prototypes.

    `owners` are all tasks that lose classes, `classes` are the removed ones, `tasks` are all tasks before the removal.
    """
    remains = []
    stay = [task for task in tasks if task not in owners or not {*task.class_names} <= {*classes}]
    place = tasks.index(owner)
    earlier_tasks = [task for task in tasks[:place] if task in stay]
    later_tasks = [task for task in tasks[place + 1 :] if task in stay]
    if owner.prompt is not None and not owner.few_shot:
        if any(equal_prompts(owner.prompt, t.shared_prompt) for t in stay):
            remains.append(SHARED)
        elif owner in stay:
            remains.append(f"the prompt of task '{owner.name}' was trained with its images")
        copies = [t.name for t in stay if t.few_shot and equal_prompts(t.prompt, owner.prompt)]
        if copies:
            remains.append(f"task '{copies[0]}' uses a copy of the prompt that was trained with its images")
    # A copied prompt was trained when its original was, which may stand before the owner.
    dependent = [t for t in later_tasks if t.prompt is not None and not t.independent]
    if any(not any(equal_prompts(t.prompt, e.prompt) for e in (*earlier_tasks, owner)) for t in dependent):
        remains.append("prompts of later tasks were trained against its prototypes and may start from its prompt")
    return remains


def _guarantee(remains: list[str]) -> str:
    if not remains:
        return "exact: the model is as if this had never been learned"
    remedy = "what remains again, in a new model" if SHARED in remains else "those tasks again without it"
    return (
        "its prototypes are gone and it can no longer be predicted, but influence remains: "
        + " and ".join(remains)
        + f"; to remove that too, learn {remedy}"
    )
