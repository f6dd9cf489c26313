"""Describe a model file without its backbone: tasks, classes, bytes, how it predicts, similar classes.

Two classes are as similar as their two most similar value prototypes. Similar classes are likely to be confused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones.precision import FP32
from protosteer.model.file import Model
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.rules import Reader
from protosteer.settings import Settings
from protosteer.util.text import printable

_CELLS = 2**23  # similarities between prototypes that are in memory at once
PAIRED = 20_000  # with more classes, pairs are not compared: at this number it takes seconds, at ten times minutes


class Pair(NamedTuple):
    """Two classes and the greatest cosine between their value prototypes."""

    a: str
    b: str
    similarity: float


def describe(model: Model, reader: Reader) -> dict[str, Any]:
    """Return what `protosteer inspect` shows, as plain data. Unknown numbers are None.

    `reader` is `reader_of(model.memory, model.settings)`.
    """
    memory = model.memory
    tasks = [_task(task) for task in memory.tasks]
    file_bytes = model.path.stat().st_size if model.path.is_file() else None
    names = ("name", "fingerprint", "dim", "depth", "image_size", "preprocessing", "weights")
    settings, defaults = model.settings.to_dict(), Settings().to_dict()
    changed_settings = [
        {"name": name, "value": value, "default": defaults[name]}
        for name, value in settings.items()
        if value != defaults[name]
    ]
    num_known = len(reader.known_similarities())
    held_out = sum(record["held_out"] for task in tasks for record in task["classes"])
    pairs = [pair._asdict() for pair in closest(memory)] if len(memory.classes) <= PAIRED else None
    return {
        "file": {"path": str(model.path), "bytes": file_bytes},
        "backbone": {name: model.backbone.get(name) for name in names},
        "precision": sorted({task["precision"] for task in tasks}),
        "settings": {"all": settings, "changed": changed_settings},
        "totals": _totals(tasks, file_bytes),
        **reader.describe(),
        "rejection": {"calibrated": num_known > 0, "images": num_known, "held_out": held_out},
        "notes": notes(memory, reader),
        "tasks": tasks,
        "confusable": pairs,
    }


def notes(memory: Memory, reader: Reader) -> list[str]:
    """Return sentences on how to improve the model."""
    unfinished = [task.name for task in memory.tasks if task.metadata.unfinished]
    remedy = "the same learn command resumes it, or with the preset instant finishes without"
    return reader.advice() + [f"training of '{name}' was interrupted; {remedy}" for name in unfinished]


def _task(task: TaskRecord) -> dict[str, Any]:
    about, prompt = task.metadata, task.prompt
    images, classes = task.images, _classes(task)
    return {
        "name": task.name,
        "learned": about.learned,
        "classes": classes,
        "images": images,
        # What was written when the task was learned holds no longer once one of its classes was forgotten.
        "image_bytes": about.image_bytes if about.images == images else None,
        "bytes": sum(record["bytes"] for record in classes) + (0 if prompt is None else prompt.nbytes),
        "prompt": None if prompt is None else describe_prompt(prompt),
        "trained": prompt is not None and not task.few_shot,
        "few_shot": task.few_shot,
        "corrected": task.corrected_from,
        "confirmed": task.confirmed,
        "compacted": task.compacted,
        "unfinished": bool(about.unfinished),
        "independent": task.independent,
        "precision": about.precision or FP32,
        "held_out": about.held_out,
        "loss": about.loss,
        "accuracy": about.accuracy,
    }


def correction(task: TaskRecord) -> dict[str, Any]:
    """Describe a task that is a correction, for a log."""
    (name,) = task.class_names
    file = task.metadata.file
    return {
        "correction": task.name,
        "date": task.metadata.learned,
        "image": None if file is None else printable(file),  # a file's name need not be UTF-8, JSON must
        "taken_for": task.corrected_from,
        "class": name,
        "confirmed": task.confirmed,
    }


def describe_prompt(prompt: Tensor) -> dict[str, int]:
    """Return the size of a prompt [S, L, D]."""
    layers, length, _ = prompt.shape
    return {"layers": layers, "length": length, "bytes": prompt.nbytes}


def _classes(task: TaskRecord) -> list[dict[str, Any]]:
    table = task.classes
    columns = {
        "name": table.names,
        "images": table.images.tolist(),
        "keys": table.key_lengths.tolist(),
        "values": table.lengths("values").tolist(),
        "points": [points or None for points in table.lengths("plain").tolist()],
        "bytes": table.bytes_per_class().tolist(),
        "held_out": table.lengths("held_out").tolist(),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _totals(tasks: Sequence[dict[str, Any]], file_bytes: int | None) -> dict[str, Any]:
    """Sum up all tasks; `bytes` counts tensors alone, as `run` does."""
    records = [record for task in tasks for record in task["classes"]]
    classes = {record["name"] for record in records}
    days = sorted(task["learned"] for task in tasks if task["learned"]) or [None]
    total = sum(task["bytes"] for task in tasks)
    images = [task["image_bytes"] for task in tasks]
    image_bytes = sum(images) if images and None not in images else None
    return {
        "classes": len(classes),
        "tasks": len(tasks),
        "images": sum(task["images"] for task in tasks),
        "centroids": sum(record["keys"] + record["values"] for record in records),
        "points": sum(record["points"] or 0 for record in records),
        "bytes": total,
        "bytes_per_class": total / len(classes) if classes else None,
        "bytes_per_task": total / len(tasks) if tasks else None,
        "image_bytes": image_bytes,
        "times_smaller": image_bytes / file_bytes if image_bytes and file_bytes else None,
        "first_learned": days[0],
        "last_learned": days[-1],
    }


def similarity(memory: Memory) -> tuple[list[str], Tensor]:
    """Return the names of all classes, and their similarities [C, C]: symmetric, 1 on the diagonal."""
    names = memory.classes
    matrix = torch.empty(len(names), len(names))
    for offset, block in _blocks(memory):
        rows = slice(offset, offset + len(block))
        matrix[rows, offset:] = block
        matrix[offset:, rows] = block.T
    return names, matrix.fill_diagonal_(1.0)


def closest(memory: Memory, most: int = 10) -> list[Pair]:
    """Return the most similar pairs of classes, the closest first; of equal pairs, that of the earlier classes.

    Nothing of size C x C is in memory.
    """
    names = memory.classes
    top: list[tuple[float, int, int]] = []  # (-similarity, a, b): the most similar pair sorts first
    for offset, block in _blocks(memory):
        floor = -top[-1][0] if len(top) == most > 0 else -math.inf
        rows, columns = (block > floor).triu(diagonal=1).nonzero(as_tuple=True)
        values, places = block[rows, columns].sort(descending=True, stable=True)
        a, b = ((part[places[:most]] + offset).tolist() for part in (rows, columns))
        top = sorted([*top, *zip((-values[:most]).tolist(), a, b, strict=True)])[:most]
    return [Pair(names[a], names[b], -negative) for negative, a, b in top]


def _blocks(memory: Memory) -> Iterator[tuple[int, Tensor]]:
    """Yield the upper triangle in blocks of rows: the number of the first row, and similarities [rows, C - first]."""
    if not len(memory):
        return
    owners = memory.record_classes.repeat_interleave(memory.table.lengths("values"))
    units = F.normalize(memory.table.values.means, dim=1)
    order = owners.argsort(stable=True)
    owners, units = owners[order], units[order]  # prototypes are in class order
    classes = len(memory.classes)
    starts = torch.searchsorted(owners, torch.arange(classes + 1)).tolist()
    step = max(1, _CELLS * classes // len(units) ** 2)
    for start in range(0, classes, step):
        stop = min(start + step, classes)
        block_rows, later_rows = slice(starts[start], starts[stop]), slice(starts[start], None)
        cosines = units[block_rows] @ units[later_rows].T
        rows = _greatest(cosines.T, owners[later_rows] - start, classes - start).T
        yield start, _greatest(rows, owners[block_rows] - start, stop - start).clamp(-1, 1)


def _greatest(rows: Tensor, owners: Tensor, count: int) -> Tensor:
    """Return maxima [count, n] over the rows [m, n] of each owner; `owners` [m] are numbers of owners."""
    table = rows.new_full((count, rows.shape[1]), -torch.inf)
    return table.scatter_reduce_(0, owners[:, None].expand_as(rows), rows, "amax")
