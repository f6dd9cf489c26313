"""What readers of a model rely on: a file from someone else may be sealed and say anything.

Tensors are checked against what docs/api.md says of them, headers by `model/schema.py`. All numbers that say how much
memory or time something takes have a bound. A `TypeError` says what is wrong.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

import torch
from torch import Tensor

from protosteer.backbones.backbone import MOST_PROMPT_TOKENS
from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.model.class_table import SKETCHES, Slices, Stack
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord
from protosteer.model.schema import DEEPEST, MANY

_GREATEST = 2.0**20  # number in an embedding or a prompt
_ROWS = 8192  # checked at a time
# Parts of classes that stand one after the other, and a tensor that has the rows of each.
_PARTS = {"values": "values.means", "keys": "keys", "held_out": "held_out", "seen": "seen"}
_MAY_LACK = ("held_out", "seen")
_PARTS |= {part: f"{part}.points" for part in SKETCHES}
_UNIT = 1.01  # greatest number in a unit vector, with what rounding adds


def check_memory(memory: Memory, dim: int | None, depth: int | None) -> None:
    """Every tensor of a memory whose backbone has that width and depth; early files do not tell them."""
    first = memory.tasks[0].classes if memory.tasks else ()
    if dim is None and not isinstance(first, Slices) and first and first[0].keys.ndim:
        dim = first[0].keys.shape[-1]
    for task in memory.tasks:
        for prompt in (p for p in (task.prompt, task.shared_prompt) if p is not None):
            check_prompt(prompt, dim, depth, f"prompt of {task.name}")
        if isinstance(task.classes, Slices):
            _check_slices(task.classes, dim)
            under_domain = [("domain" in task.classes.stack.starts, task.name)]
        else:
            for record in task.classes:
                _check_class(record, dim)
            under_domain = [(record.shared is not None, record.name) for record in task.classes]
        for known, name in under_domain:
            if known != (task.shared_prompt is not None):
                raise TypeError(f"{name} lacks its points under the prompt for all classes, or the prompt")


def check_prompt(prompt: Tensor, dim: int | None, depth: int | None, what: str) -> None:
    _check_tensor(prompt, 3, dim, what)
    layers, tokens, _ = prompt.shape
    if layers > (depth or DEEPEST) or tokens > MOST_PROMPT_TOKENS:
        raise TypeError(f"{what} has {layers} layers of {tokens} tokens, the backbone {depth} layers")


def check_packed(parts: Mapping[str, Tensor], what: str) -> None:
    """A sketch as it stands in a file, before it is unpacked: eight bits come with their steps."""
    points, steps = parts["points"], parts.get("steps")
    if (points.dtype == torch.int8) != (steps is not None):
        raise TypeError(f"points of {what} have no steps, or steps and no use for them")
    if steps is not None:
        if steps.dtype != torch.float16 or steps.shape != points.shape[:1]:
            raise TypeError(f"steps of {what} have shape {list(steps.shape)}, {steps.dtype}")
        if not ((steps >= 0) & steps.isfinite()).all():
            raise TypeError(f"steps of {what} are negative or not finite")
    for tensor in (points, parts["deviations"]):
        if tensor.dtype not in (torch.int8, torch.float16, torch.float32):
            raise TypeError(f"points of {what} are {tensor.dtype}")


def check_stack(stack: Stack, dim: int | None) -> None:
    """Classes that a file has one after the other: the same demands, each made once for all of them."""
    tensors, starts = stack.tensors, stack.starts
    if not {"values", *_MAY_LACK} <= set(starts):
        raise TypeError("classes have no centroids, or do not tell which are whose")
    if ("plain" in starts) == ("keys" in starts) or ("domain" in starts and "plain" not in starts):
        raise TypeError("classes have neither keys nor points, or both")
    for part, rows in starts.items():
        if part not in _PARTS:
            raise TypeError(f"classes have parts called {reprlib.repr(part)}")
        _check_starts(rows, len(stack.names), tensors[_PARTS[part]], part)
    for kind, least in (("means", -_GREATEST), ("deviations", 0.0)):
        _check_rows(tensors[f"values.{kind}"], 2, dim, f"{kind} of centroids", least)
    if len(tensors["values.means"]) != len(tensors["values.deviations"]):
        raise TypeError("centroids are not as many as their deviations")
    _check_counts(tensors["values.counts"], len(tensors["values.means"]), "centroids")
    for part in (part for part in SKETCHES if part in starts):
        _check_sketches(stack, part, dim)
    if "domain" in starts and not torch.equal(stack.singles("plain"), stack.singles("domain")):
        raise TypeError("classes have points of different images in their two sketches")
    if "keys" in starts:
        _check_tensor(tensors["keys"], 2, dim, "keys")
    held_out = tensors["held_out"]
    if held_out.ndim != 1 or held_out.dtype != torch.float32 or not held_out.isfinite().all():
        raise TypeError("held-out similarities are not a list of numbers")
    if tensors["seen"].dtype != torch.int64 or tensors["seen"].ndim != 1:
        raise TypeError("digests of files are not a list of whole numbers")


def _check_slices(classes: Slices, dim: int | None) -> None:
    """That the width is the backbone's; numbers were checked when the file was read."""
    width = classes.stack.tensors["values.means"].shape[-1]
    if dim not in (None, width):
        raise TypeError(f"centroids have {width} dimensions, the backbone {dim}")


def _check_starts(starts: Tensor, classes: int, rows: Tensor, what: str) -> None:
    """Where the rows of each class begin: from 0 to the end, and none without rows but in what may lack."""
    if starts.dtype != torch.int64 or starts.shape != (classes + 1,) or not rows.ndim:
        raise TypeError(f"starts of {what} are not one more than classes")
    least = 0 if what in _MAY_LACK else 1
    if int(starts[0]) != 0 or int(starts[-1]) != len(rows) or int(starts.diff().min()) < least:
        raise TypeError(f"starts of {what} do not ascend from 0 to {len(rows)}")


def _check_sketches(stack: Stack, part: str, dim: int | None) -> None:
    parts = {name: stack.tensors[f"{part}.{name}"] for name in ("points", "counts", "deviations")}
    if f"{part}.steps" in stack.tensors:
        parts["steps"] = stack.tensors[f"{part}.steps"]
    check_packed(parts, part)
    points = parts["points"]
    if "steps" in parts:  # codes are at most 128 of a step, so that the steps bound the points
        if points.ndim != 2 or dim not in (None, points.shape[1]) or not points.numel():
            raise TypeError(f"points of {part} have shape {list(points.shape)}")
        if float(parts["steps"].max()) * 128 > _UNIT * 128 / 127:
            raise TypeError(f"points of {part} are beyond {_UNIT:g}")
    else:
        _check_rows(points, 2, dim, f"points of {part}", -_UNIT, _UNIT)
    _check_rows(parts["deviations"], 2, points.shape[1], f"deviations of {part}", 0.0, _UNIT)
    if len(parts["deviations"]) != len(stack.names):
        raise TypeError(f"deviations of {part} are not as many as classes")
    _check_counts(parts["counts"], len(points), f"points of {part}")
    if bool((stack.starts[part].diff() < stack.singles(part)).any()):
        raise TypeError(f"{part} has a class with fewer points than images as they are")


def _check_rows(
    rows: Tensor, axes: int, dim: int | None, what: str, least: float = -_GREATEST, most: float = _GREATEST
) -> None:
    """In single or half precision, a part at a time, so that little memory is taken."""
    if rows.dtype not in (torch.float16, torch.float32) or rows.ndim != axes or not rows.numel():
        raise TypeError(f"{what} have shape {list(rows.shape)}, {rows.dtype}")
    for some in rows.split(_ROWS):
        _check_tensor(some.float(), axes, dim, what, least, most)


def _check_class(record: ClassRecord, dim: int | None) -> None:
    name, values, held_out = record.name, record.values, record.heldout_similarities
    _check_tensor(record.keys, 2, dim, f"keys of {name}")
    _check_tensor(values.means, 2, dim, f"centroids of {name}")
    _check_tensor(values.deviations, 2, dim, f"deviations of {name}", least=0.0)
    if len(values.means) != len(values.deviations):
        raise TypeError(f"centroids of {name} are not as many as their deviations")
    _check_counts(values.counts, len(values.means), f"centroids of {name}")
    for sketch in (s for s in (record.plain, record.shared) if s is not None):
        check_sketch(sketch, name, dim)
    if record.shared and (record.plain is None or record.plain.num_exact != record.shared.num_exact):
        raise TypeError(f"{name} has points of different images in its two sketches")
    if held_out is not None and not (
        held_out.ndim == 1 and held_out.dtype.is_floating_point and held_out.isfinite().all()
    ):
        raise TypeError(f"held-out similarities of {name} are not a list of numbers")
    if record.file_digests is not None and (
        record.file_digests.ndim != 1 or record.file_digests.dtype != torch.int64
    ):
        raise TypeError(f"digests of files of {name} are not a list of whole numbers")


def check_sketch(sketch: ClassSummary, name: str, dim: int | None) -> None:
    """Check the prototypes of class `name` in one feature space."""
    _check_tensor(sketch.points, 2, dim, f"points of {name}", -_UNIT, _UNIT)
    _check_tensor(sketch.deviations, 1, dim, f"deviations of {name}", 0.0, _UNIT)
    _check_counts(sketch.counts, len(sketch.points), f"points of {name}")
    if len(sketch.points) < sketch.num_exact:
        raise TypeError(f"{name} has {len(sketch.points)} points for more images")


def _check_counts(counts: Tensor, number: int, what: str) -> None:
    if counts.dtype != torch.int64 or counts.shape != (number,):
        raise TypeError(f"{what} are not as many as their counts, or these are not whole numbers")
    if int(counts.min()) < 1 or int(counts.max()) > MANY:
        raise TypeError(f"a count of {what} is below 1, or impossible")


def _check_tensor(
    tensor: Tensor, axes: int, dim: int | None, what: str, least: float = -_GREATEST, most: float = _GREATEST
) -> None:
    shaped = tensor.ndim == axes and dim in (None, tensor.shape[-1]) and tensor.numel() > 0
    if tensor.dtype != torch.float32 or not shaped:
        raise TypeError(f"{what} have shape {list(tensor.shape)}, {tensor.dtype}")
    if not ((tensor >= least) & (tensor <= most)).all():  # false of NaN too
        raise TypeError(f"{what} are not finite, or beyond {least:g} to {most:g}")
