"""Image files that a model was learned from, recognised by their content.

Each class keeps a digest of every file that was learned or held out: eight bytes, from which no image can be made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from protosteer.data.class_folders import Files
from protosteer.data.image_files import image_bytes, in_threads
from protosteer.model.records import TaskRecord
from protosteer.util.files import digest


@dataclass(frozen=True)
class KnownFiles:
    """Files that a model was learned from.

    Attributes:
        same_class: Rows of files that their own class was learned from.
        other_class: Rows of files that another class was learned from, with its name.
    """

    same_class: list[int]
    other_class: dict[int, str]

    @classmethod
    def find(cls, tasks: Sequence[TaskRecord], files: Files, digests: Mapping[Path, int]) -> KnownFiles:
        """Look files up by the digests of their contents."""
        owners: dict[int, list[str]] = {}
        for number, name in (pair for task in tasks for pair in task.classes.find_digests(digests.values())):
            owners.setdefault(number, []).append(name)
        learned_as = [owners.get(digests[path], []) for path in files.paths]
        rows = [i for i, label in enumerate(files.labels) if label in learned_as[i]]
        return cls(rows, {i: names[0] for i, names in enumerate(learned_as) if names and files.labels[i] not in names})


def digests_of(paths: Sequence[Path]) -> dict[Path, int]:
    """Read image files and digest their contents."""
    return dict(zip(paths, in_threads(lambda path: digest(image_bytes(path)), paths), strict=True))


def with_file_digests(record: TaskRecord, files: Files, digests: Mapping[Path, int]) -> TaskRecord:
    """Return a task whose classes keep the digests of their files, in ascending order."""
    by_class: dict[str, set[int]] = {}
    for path, label in zip(files.paths, files.labels, strict=True):
        by_class.setdefault(label, set()).add(digests[path])
    parts = [torch.tensor(sorted(by_class.get(name, ())), dtype=torch.int64) for name in record.class_names]
    return dataclasses.replace(record, classes=record.classes.with_rows("seen", parts))
