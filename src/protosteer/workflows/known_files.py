"""Images that a model has seen before, told by the content of their files.

Of every file that was learned or held out, its class keeps a digest: eight bytes, from which no image can be made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protosteer.data.class_folders import Files
from protosteer.data.image_files import image_bytes, in_threads
from protosteer.errors import DataError
from protosteer.model.records import TaskRecord
from protosteer.util.reading import digest


def file_digests(paths: Sequence[Path]) -> list[int]:
    return list(in_threads(_file_digest, paths))


def _file_digest(path: Path) -> int:
    try:
        return digest(image_bytes(path))
    except OSError as error:
        raise DataError(
            f"{path} has gone since its folder was read; start again ({error.strerror})"
        ) from error


@dataclass(frozen=True)
class Again:
    """Of files and their digests: those whose class has seen them, and those that another class has."""

    same: list[int]  # places in the files
    other: dict[int, str]  # place: the other class

    @classmethod
    def find(cls, tasks: Sequence[TaskRecord], files: Files, digests: Sequence[int]) -> Again:
        owners = _owners(tasks, set(digests))
        same = [i for i, label in enumerate(files.labels) if label in owners.get(digests[i], ())]
        left = sorted({*range(len(files))} - {*same})
        return cls(same, {i: owners[digests[i]][0] for i in left if digests[i] in owners})


def _owners(tasks: Sequence[TaskRecord], digests: Collection[int]) -> dict[int, list[str]]:
    """Which of the digests are known, and the classes that know them."""
    asked = torch.tensor(sorted(digests), dtype=torch.int64)
    owners: dict[int, list[str]] = {}
    for record in (record for task in tasks for record in task.classes):
        if record.file_digests is not None:
            for number in record.file_digests[torch.isin(record.file_digests, asked)].tolist():
                owners.setdefault(number, []).append(record.name)
    return owners


def with_seen(record: TaskRecord, files: Files, digests: Sequence[int]) -> TaskRecord:
    """A task's record whose classes keep the digests of their files, in ascending order."""
    by_class: dict[str, set[int]] = {}
    for label, number in zip(files.labels, digests, strict=True):
        by_class.setdefault(label, set()).add(number)

    def seen(name: str) -> Tensor | None:
        return torch.tensor(sorted(by_class[name]), dtype=torch.int64) if name in by_class else None

    classes = tuple(dataclasses.replace(c, file_digests=seen(c.name)) for c in record.classes)
    return dataclasses.replace(record, classes=classes)
