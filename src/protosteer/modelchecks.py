"""What readers of a model rely on: a file from someone else may be sealed and say anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protosteer.method.memory import ClassRecord, Memory
from protosteer.method.prototypes import Sketch


def check_backbone(about: dict[str, Any]) -> None:
    for key, kind in {"name": str, "fingerprint": str, "image_size": int, "preprocessing": dict}.items():
        _check(about[key], kind, f"backbone {key}")
    for key in ("dim", "depth"):
        _check(about.get(key), (int, type(None)), f"backbone {key}")


def check_task(header: dict[str, Any]) -> None:
    kinds = {"name": str, "classes": list, "prompt": bool, "independent": bool, "about": dict}
    for key, kind in kinds.items():
        _check(header[key], kind, f"task {key}")
    for name in header["classes"]:
        _check(name, str, "class name")
    if len(set(header["classes"])) < len(header["classes"]):
        raise TypeError(f"task {header['name']} has a class twice")
    _check(header.get("few_shot", False), bool, "task few_shot")


def _check(value: Any, kind: type | tuple[type, ...], what: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {value!r}")


def check_memory(memory: Memory, backbone: dict[str, Any]) -> None:
    """Every tensor as docs/api.md describes it."""
    dim, depth = backbone.get("dim"), backbone.get("depth")
    for task in memory.tasks:
        for prompt in (p for p in (task.prompt, task.domain) if p is not None):
            dim = dim or prompt.shape[-1]
            check_prompt(prompt, dim, depth, f"prompt of {task.name}")
        for record in task.classes:
            dim, values = dim or record.keys.shape[-1], record.values
            for tensor in (record.keys, values.means, values.deviations):
                _check_tensor(tensor, 2, dim, f"centroids of {record.name}")
            if not len(values.means) == len(values.deviations) == values.counts.numel():
                raise TypeError(f"centroids of {record.name} are not as many as their counts")
            if values.counts.ndim != 1 or values.counts.dtype != torch.int64:
                raise TypeError(f"counts of {record.name} are not whole numbers")
            for sketch in (s for s in (record.plain, record.domain) if s is not None):
                _check_sketch(sketch, record, dim)
            if (record.domain is None) != (task.domain is None):
                raise TypeError(
                    f"{record.name} lacks its points under the prompt for all classes, or the prompt"
                )
            if record.plain and record.domain and record.plain.single != record.domain.single:
                raise TypeError(f"{record.name} has points of different images in its two sketches")
            held_out = record.similarities
            if held_out is not None and (held_out.ndim != 1 or not held_out.dtype.is_floating_point):
                raise TypeError(f"held-out similarities of {record.name} are not a list of numbers")


def check_prompt(prompt: Tensor, dim: int | None, depth: int | None, what: str) -> None:
    """dim, depth: of the backbone, if they are known."""
    _check_tensor(prompt, 3, dim or prompt.shape[-1], what)
    if depth is not None and len(prompt) > depth:
        raise TypeError(f"{what} has {len(prompt)} layers, the backbone {depth}")


def _check_sketch(sketch: Sketch, record: ClassRecord, dim: int) -> None:
    _check_tensor(sketch.points, 2, dim, f"points of {record.name}")
    _check_tensor(sketch.deviations, 1, dim, f"deviations of {record.name}")
    counts, points = sketch.counts, len(sketch.points)
    if counts.shape != (points,) or counts.dtype != torch.int64 or int(counts.min()) < 1:
        raise TypeError(f"points of {record.name} are not as many as their counts, or a count is below 1")
    if not sketch.points.isfinite().all() or not sketch.deviations.isfinite().all():
        raise TypeError(f"points of {record.name} are not finite")
    if points < sketch.single:
        raise TypeError(f"{record.name} has {points} points for more images")


def _check_tensor(tensor: Tensor, axes: int, dim: int, what: str) -> None:
    if tensor.dtype != torch.float32 or tensor.ndim != axes or tensor.shape[-1] != dim or not tensor.numel():
        raise TypeError(f"{what} have shape {list(tensor.shape)}, {tensor.dtype}")
