"""What a model file holds, told without its backbone: tasks, classes, bytes, and which classes are most alike.

Two classes are as alike as their two most similar value centroids. Prediction compares an image with the same
centroids, so that classes which are alike are the likely ones to be confused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.method.memory import ClassRecord, Memory, TaskRecord
from protosteer.modelfile import Model
from protosteer.photos import rejection
from protosteer.settings import Settings

_CELLS = 2**23  # similarities between centroids that are in memory at once


class Pair(NamedTuple):
    """Two classes and the greatest cosine between their value centroids."""

    a: str
    b: str
    similarity: float


def describe(model: Model) -> dict[str, Any]:
    """All that `protosteer inspect` shows, as plain data. A figure that the model does not know is None."""
    tasks = [_task(task) for task in model.memory.tasks]
    file_bytes = model.path.stat().st_size if model.path.is_file() else None
    held_out = sum(record["held_out"] for task in tasks for record in task["classes"])
    return {
        "file": {"path": str(model.path), "bytes": file_bytes},
        "backbone": _backbone(model),
        "settings": {"all": model.settings.to_dict(), "changed": _changed(model.settings)},
        "totals": _totals(tasks, file_bytes),
        "rejection": {"calibrated": rejection.calibrated(model.memory), "held_out": held_out},
        "tasks": tasks,
        "confusable": [pair._asdict() for pair in closest(model.memory)],
    }


def _backbone(model: Model) -> dict[str, Any]:
    names = ("name", "fingerprint", "dim", "depth", "image_size", "preprocessing", "weights")
    return {name: model.backbone.get(name) for name in names}


def _changed(settings: Settings) -> list[dict[str, Any]]:
    """Settings that are not the defaults."""
    defaults = Settings().to_dict()
    return [
        {"name": name, "value": value, "default": defaults[name]}
        for name, value in settings.to_dict().items()
        if value != defaults[name]
    ]


def _task(task: TaskRecord) -> dict[str, Any]:
    about = task.about
    images = sum(record.images for record in task.classes)
    # What was written when the task was learned holds no longer once one of its classes was forgotten.
    whole = about.images == images
    return {
        "name": task.name,
        "learned": about.learned,
        "classes": [_class(record) for record in task.classes],
        "images": images,
        "image_bytes": about.image_bytes if whole else None,
        "bytes": task.bytes,
        "prompt": None if task.prompt is None else _prompt(task.prompt),
        "trained": task.prompt is not None and not task.few_shot,
        "few_shot": task.few_shot,
        "independent": task.independent,
        "loss": about.loss,
        "accuracy": about.accuracy,
    }


def _prompt(prompt: Tensor) -> dict[str, Any]:
    layers, length, _ = prompt.shape
    return {"layers": layers, "length": length, "bytes": _size(prompt)}


def _class(record: ClassRecord) -> dict[str, Any]:
    values, held_out = record.values, record.similarities
    tensors = [record.keys, values.means, values.deviations, values.counts]
    return {
        "name": record.name,
        "images": record.images,
        "keys": len(record.keys),
        "values": len(values.means),
        "bytes": sum(map(_size, tensors if held_out is None else [*tensors, held_out])),
        "held_out": 0 if held_out is None else len(held_out),
    }


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _totals(tasks: Sequence[dict[str, Any]], file_bytes: int | None) -> dict[str, Any]:
    """Sums over tasks; `bytes` of the tensors alone, so that they are comparable with what `run` measures."""
    classes = [record for task in tasks for record in task["classes"]]
    days = sorted(task["learned"] for task in tasks if task["learned"])
    total = sum(task["bytes"] for task in tasks)
    images = [task["image_bytes"] for task in tasks]
    image_bytes = sum(images) if images and None not in images else None
    return {
        "classes": len(classes),
        "tasks": len(tasks),
        "images": sum(task["images"] for task in tasks),
        "centroids": sum(record["keys"] + record["values"] for record in classes),
        "bytes": total,
        "bytes_per_class": total / len(classes) if classes else None,
        "bytes_per_task": total / len(tasks) if tasks else None,
        "image_bytes": image_bytes,
        "times_smaller": image_bytes / file_bytes if image_bytes and file_bytes else None,
        "first_learned": days[0] if days else None,
        "last_learned": days[-1] if days else None,
    }


def similarity(memory: Memory) -> tuple[list[str], Tensor]:
    """Names of all classes, and how alike each two of them are [C, C]: symmetric, 1 on the diagonal."""
    units = _units(memory)
    matrix = torch.empty(len(units), len(units))
    step = _step(units)
    for first in range(0, len(units), step):
        block = _greatest(units[first : first + step], units[first:])
        matrix[first : first + step, first:] = block
        matrix[first:, first : first + step] = block.T
    return memory.classes, matrix.fill_diagonal_(1.0)


def closest(memory: Memory, most: int = 10) -> list[Pair]:
    """The pairs of classes that are most alike, the closest first, of equal ones that of the earlier classes.

    Nothing of size C x C is in memory.
    """
    units, names = _units(memory), memory.classes
    best: list[tuple[float, int, int]] = []  # (-similarity, a, b), so that they sort as wanted
    step = _step(units)
    for first in range(0, len(units), step):
        floor = -best[-1][0] if len(best) == most > 0 else -math.inf
        block = _greatest(units[first : first + step], units[first:])
        rows, columns = (block > floor).triu(diagonal=1).nonzero(as_tuple=True)
        values, places = block[rows, columns].sort(descending=True, stable=True)
        a, b = ((part[places[:most]] + first).tolist() for part in (rows, columns))
        best = sorted([*best, *zip((-values[:most]).tolist(), a, b, strict=True)])[:most]
    return [Pair(names[a], names[b], -negative) for negative, a, b in best]


def _step(units: Tensor) -> int:
    """How many classes can be compared with all others at a time."""
    return max(1, _CELLS // max(1, len(units) * units.shape[1] ** 2))


def _greatest(some: Tensor, others: Tensor) -> Tensor:
    """[a, c, D] and [b, c, D] -> [a, b]: the greatest cosine between any centroid of one and any of the other."""
    cosines = some.flatten(0, 1) @ others.flatten(0, 1).T
    rows = cosines.unflatten(0, some.shape[:2]).amax(dim=1)
    return rows.unflatten(1, others.shape[:2]).amax(dim=2).clamp(-1, 1)


def _units(memory: Memory) -> Tensor:
    """[C, c, D]: normalised value centroids; where a class has fewer than others its last one is repeated."""
    groups = [record.values.means for task in memory.tasks for record in task.classes]
    if not groups:
        return torch.empty(0, 1, 1)
    sizes = torch.tensor([len(group) for group in groups])
    starts = sizes.cumsum(dim=0) - sizes
    places = torch.minimum(torch.arange(int(sizes.max())), sizes[:, None] - 1)
    return F.normalize(torch.cat(groups), dim=1)[starts[:, None] + places]
