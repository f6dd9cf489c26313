"""Merging is concatenation of records: what several learners know, in one list."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protosteer.errors import LearnerError
from protosteer.method.memory import Memory, TaskRecord
from protosteer.settings import Settings


@dataclass(frozen=True)
class Part:
    """What merging has to know of a learner or a model file."""

    backbone: Mapping[str, Any]  # see Backbone.describe
    settings: Settings
    memory: Memory


def combine(
    parts: Sequence[Part],
    renames: Mapping[str, str] | None = None,
    task_renames: Mapping[str, str] | None = None,
) -> Memory:
    """The tasks of all parts, in the order given. Same backbone; no class or task name twice.

    Renames, old name to new, are for names that clash: they apply to every part but the first.
    """
    first, merged = parts[0], Memory()
    renames, task_renames = dict(renames or {}), dict(task_renames or {})
    _check_renames(parts, renames, task_renames)
    for i, part in enumerate(parts):
        _check_alike(first, part)
        for task in part.memory.tasks:
            new = _renamed(task, renames, task_renames) if i else task
            _check_new(merged, new)
            merged.add(new)
    return merged


def _check_alike(first: Part, other: Part) -> None:
    mine, theirs = first.backbone, other.backbone
    if mine["fingerprint"] != theirs["fingerprint"]:
        raise LearnerError(
            f"learners have different backbones: {mine['name']} ({mine['fingerprint'][:12]}) "
            f"and {theirs['name']} ({theirs['fingerprint'][:12]}); only equal ones can be merged"
        )
    if mine["preprocessing"] != theirs["preprocessing"]:
        raise LearnerError(
            f"learners see images differently: preprocessing is {mine['preprocessing']} and "
            f"{theirs['preprocessing']}; teach one of them again with that of the other"
        )
    for setting in ("neighbours", "temperature"):
        here, there = getattr(first.settings, setting), getattr(other.settings, setting)
        if here != there:
            raise LearnerError(
                f"learners predict differently: {setting} is {here} and {there}; make them equal"
            )


def _check_new(merged: Memory, task: TaskRecord) -> None:
    if task.name in merged.task_names:
        raise LearnerError(
            f"two tasks are named '{task.name}'; give the later one another name with task_renames="
        )
    for i, name in enumerate(task.class_names):
        if name in task.class_names[:i]:
            raise LearnerError(
                f"two classes of task '{task.name}' would be named '{name}'; rename one of them"
            )
        if name in merged.classes:
            raise LearnerError(
                f"class '{name}' is in more than one model; give the later one another name with renames="
            )


def _check_renames(
    parts: Sequence[Part], renames: Mapping[str, str], task_renames: Mapping[str, str]
) -> None:
    later = [part.memory for part in parts[1:]]
    for kind, asked, known in (
        ("class", renames, {name for memory in later for name in memory.classes}),
        ("task", task_renames, {name for memory in later for name in memory.task_names}),
    ):
        for old in asked:
            if old not in known:
                raise LearnerError(
                    f"no {kind} named '{old}' in what is merged into the first; nothing to rename"
                )


def _renamed(task: TaskRecord, renames: Mapping[str, str], task_renames: Mapping[str, str]) -> TaskRecord:
    classes = tuple(dataclasses.replace(c, name=renames.get(c.name, c.name)) for c in task.classes)
    return dataclasses.replace(task, name=task_renames.get(task.name, task.name), classes=classes)
