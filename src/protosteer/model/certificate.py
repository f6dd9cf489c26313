"""A certificate of forgetting: what was removed from a model file, what is left, and how to check both.

It is plain JSON with a checksum, which detects accidental changes. It is not a signature.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protosteer.errors import ModelFileError
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.model.schema import CERTIFICATE
from protosteer.model.schema import check as check_schema
from protosteer.model.unlearning import Forgotten
from protosteer.util.files import file_hash, read_regular

FORMAT = 1


def record_hash(task: TaskRecord, name: str | None = None) -> str:
    """Return the sha256 of all numbers of a task, or of one of its classes; names do not count."""
    tensors = dict(task.tensors()) if name is None else task.classes.take([task.class_names.index(name)]).packed()
    checksum = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        checksum.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
        checksum.update(tensor.contiguous().cpu().numpy().tobytes())
    return checksum.hexdigest()


def make(
    model: Path,
    old_tasks: Sequence[TaskRecord],
    sha256_before: str,
    new_tasks: Sequence[TaskRecord],
    forgotten: Sequence[Forgotten],
    version: str,
) -> dict[str, Any]:
    """Return the certificate of a model file that has just forgotten something, given its tasks before and after."""
    pairs_left = {(task.name, name) for task in new_tasks for name in task.class_names}
    lost = [(task, name) for task in old_tasks for name in task.class_names if (task.name, name) not in pairs_left]
    contents = {
        "format": FORMAT,
        "protosteer": version,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": model.name,
        "sha256_before": sha256_before,
        "sha256_after": file_hash(model, "sha256"),
        "exact": all(summary.exact for summary in forgotten),
        "forgotten": [dataclasses.asdict(summary) for summary in forgotten],
        "removed": [{"class": name, "task": task.name, "sha256": record_hash(task, name)} for task, name in lost],
        "left": [
            {"task": t.name, "classes": t.class_names, "independent": t.independent, "sha256": record_hash(t)}
            for t in new_tasks
        ],
    }
    return {**contents, "checksum": _checksum(contents)}


def _checksum(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """Read a certificate; raise a `ModelFileError` if the file is no certificate, or was changed."""
    try:
        contents = json.loads(read_regular(path))
        checksum = contents.pop("checksum")
        check_schema(contents, CERTIFICATE, "the certificate's")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = (
            f"{path} is not a certificate of forgetting; give the file that was written when the class was forgotten"
        )
        raise ModelFileError(message, code="no-certificate", path=path) from error
    if checksum != _checksum(contents):
        message = f"{path} was changed after it was written; use another copy"
        raise ModelFileError(message, code="changed-certificate", path=path)
    return dict(contents)


def check(certificate: Mapping[str, Any], model: Path, memory: Memory) -> list[tuple[bool, str]]:
    """Compare a model file with a certificate; return for each check whether it passed, and what was checked."""
    is_same_file = file_hash(model, "sha256") == certificate["sha256_after"]
    hashes = {record_hash(task, name) for task in memory.tasks for name in task.class_names}
    names = sorted({entry["class"] for entry in certificate["removed"]})
    leaks = sorted({entry["class"] for entry in certificate["removed"] if entry["sha256"] in hashes})
    line = f"{', '.join(leaks)}: its numbers are in the model" if leaks else f"gone from the model: {', '.join(names)}"
    checks = [(not leaks, line)]
    if is_same_file:
        return [(True, "the model is the one that the certificate was written for, byte by byte"), *checks]
    task_hashes = {entry["sha256"] for entry in certificate["left"]}
    count = len(task_hashes & {record_hash(task) for task in memory.tasks})
    line = f"the model was changed since; {count} of {len(task_hashes)} tasks are as they were"
    return [(True, line), *checks]
