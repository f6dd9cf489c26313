"""Image files that a model was learned from, recognised by their content.

Each class keeps a digest of every file that was learned or held out: eight bytes, from which no image can be made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.data.class_folders import Files
from protosteer.model.records import TaskRecord


@dataclass(frozen=True)
class KnownFiles:
    """Files that a model has met before.

    Attributes:
        same_class: Rows of files that their own class was learned from.
        other_class: Rows of files that another class was learned from, with its name.
    """

    same_class: list[int]
    other_class: dict[int, str]

    @classmethod
    def find(cls, tasks: Sequence[TaskRecord], files: Files, digests: Sequence[int]) -> KnownFiles:
        """Look files up by their digests."""
        owners: dict[int, list[str]] = {}
        for number, name in (found for task in tasks for found in task.classes.find_digests(digests)):
            owners.setdefault(number, []).append(name)
        same = [i for i, label in enumerate(files.labels) if label in owners.get(digests[i], ())]
        left = sorted({*range(len(files))} - {*same})
        return cls(same, {i: owners[digests[i]][0] for i in left if digests[i] in owners})


def with_file_digests(record: TaskRecord, files: Files, digests: Sequence[int]) -> TaskRecord:
    """Return a task whose classes keep the digests of their files, in ascending order."""
    by_class: dict[str, set[int]] = {}
    for label, number in zip(files.labels, digests, strict=True):
        by_class.setdefault(label, set()).add(number)

    def own(name: str) -> Tensor | None:
        return torch.tensor(sorted(by_class[name]), dtype=torch.int64) if name in by_class else None

    parts = [own(name) for name in record.class_names]
    return dataclasses.replace(record, classes=record.classes.with_rows("seen", parts))
