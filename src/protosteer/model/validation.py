"""Check the tensors of a model file, which may come from an untrusted source.

Every number that says how much memory or time something takes has a bound. A `TypeError` says what is wrong.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from protosteer.backbones.backbone import MAX_PROMPT_TOKENS
from protosteer.model.class_table import GROUPS, LAYERS, SUMMARIES
from protosteer.model.memory import Memory
from protosteer.model.schema import MAX_COUNT, MAX_DEPTH

MAX_VALUE = 2.0**20  # in an embedding or a prompt
MAX_SPACES = 64  # feature spaces
_UNIT = 1.01  # greatest number in a unit vector, with what rounding adds
_BLOCK = 8192  # rows that are checked at a time, so that little memory is taken


def check_columns(
    names: Sequence[str], columns: Mapping[str, Tensor], starts: Mapping[str, Tensor], dim: int | None
) -> None:
    """Check the columns of a class table before it is built; see `ClassTable`. dim: None if unknown."""
    for group, rows in starts.items():
        if group not in GROUPS:
            raise TypeError(f"classes have a group called {reprlib.repr(group)}")
        _check_starts(rows, len(names), columns[GROUPS[group][0]], group)
    for field in columns:
        if field.partition(".")[0] not in starts:
            raise TypeError(f"column {reprlib.repr(field)} has no starts")
    lengths = {group: starts[group].diff() if group in starts else torch.zeros(len(names)) for group in GROUPS}
    if bool((lengths["values"] < 1).any()) or bool(((lengths["keys"] < 1) == (lengths["plain"] < 1)).any()):
        raise TypeError("a class lacks value prototypes or keys, or has both keys and a summary")
    if not names:
        return
    means = columns["values.means"]
    _check_floats(means, 2, dim, "value prototypes")
    dim = means.shape[1]
    _check_floats(columns["values.deviations"], 2, dim, "value deviations", lower=0.0)
    if len(columns["values.deviations"]) != len(means):
        raise TypeError("value prototypes are not as many as their deviations")
    _check_counts(columns["values.counts"], len(means), "value prototypes")
    if "keys" in starts:
        _check_floats(columns["keys"], 2, dim, "keys", kinds=(torch.float32,))
    for part in (part for part in SUMMARIES if part in starts):
        _check_summaries(columns, part, dim, int((lengths[part] > 0).sum()))
        if LAYERS[part] in starts:
            _check_layers(columns, LAYERS[part], dim)
            layer_lengths = lengths[LAYERS[part]]
            if bool(((layer_lengths > 0) & (layer_lengths != lengths[part])).any()):
                raise TypeError(f"prototypes of {part} are not as many in earlier layers")
    if "held_out" in starts:
        _check_floats(columns["held_out"], 1, None, "held-out similarities", kinds=(torch.float32,), may_be_empty=True)
    if "seen" in starts and (columns["seen"].ndim != 1 or columns["seen"].dtype != torch.int64):
        raise TypeError("digests of files are not a list of whole numbers")


def check_model(memory: Memory) -> None:
    """Check a memory before it is written as thoroughly as after it is read."""
    table = memory.table
    check_columns(table.names, table.columns, table.starts, None)
    check_memory(memory, table.columns["values.means"].shape[1] if len(table) else None, None)


def check_memory(memory: Memory, dim: int | None, depth: int | None) -> None:
    """Check prompts, and that both summaries of a class are of the same images."""
    _check_prompts(memory, dim, depth)
    table, tasks = memory.table, memory.record_tasks
    under_prompt = torch.tensor([task.shared_prompt is not None for task in memory.tasks], dtype=torch.bool)[tasks]
    for row in ((table.lengths("domain") > 0) != under_prompt).nonzero()[:1, 0].tolist():
        name = memory.tasks[int(tasks[row])].name
        raise TypeError(f"a class of {name} lacks its summary under the shared prompt, or the prompt")
    rows = (table.lengths("domain") > 0).nonzero()[:, 0]
    if len(rows):
        a, b = (table.take(rows).summaries(part) for part in SUMMARIES)
        if a is None or b is None or not torch.equal(a.num_exact, b.num_exact):
            raise TypeError("classes have prototypes of different images in their two summaries")


def check_fits(memory: Memory, dim: int, depth: int) -> None:
    """Check that prompts and prototypes fit a backbone of that width and depth."""
    _check_prompts(memory, dim, depth)
    for task in memory.tasks:
        width = task.classes.columns["values.means"].shape[1]
        if width != dim:
            raise TypeError(f"prototypes have {width} dimensions, the backbone {dim}")


def _check_prompts(memory: Memory, dim: int | None, depth: int | None) -> None:
    owners = {id(prompt): (prompt, task.name) for task in memory.tasks for prompt in (task.prompt, task.shared_prompt)}
    for prompt, name in owners.values():
        if prompt is not None:
            check_prompt(prompt, dim, depth, f"prompt of {name}")


def check_prompt(prompt: Tensor, dim: int | None, depth: int | None, label: str) -> None:
    """Check a prompt [S, L, D]."""
    _check_floats(prompt, 3, dim, label, kinds=(torch.float32,))
    layers, tokens, _ = prompt.shape
    if layers > (depth or MAX_DEPTH) or tokens > MAX_PROMPT_TOKENS:
        raise TypeError(f"{label} has {layers} layers of {tokens} tokens, the backbone {depth} layers")


def check_coding(points: Tensor, steps: Tensor | None, label: str) -> None:
    """Check that prototypes [P, D] of eight bits have their steps [P], and only those."""
    if (points.dtype == torch.int8) != (steps is not None):
        raise TypeError(f"prototypes of {label} lack steps, or have steps without use")
    if steps is None:
        if points.dtype not in (torch.float16, torch.float32):
            raise TypeError(f"prototypes of {label} are {points.dtype}")
        return
    if steps.dtype != torch.float16 or points.ndim != 2 or steps.shape != points.shape[:1]:
        raise TypeError(f"steps of {label} have shape {list(steps.shape)}, {steps.dtype}")
    # A code is at most 128 steps, so that steps bound prototypes; false of NaN too.
    if not ((steps >= 0) & (steps.float() <= _UNIT / 127)).all():
        raise TypeError(f"steps of {label} are beyond 0 to {_UNIT / 127:g}")


def _check_starts(starts: Tensor, classes: int, rows: Tensor, label: str) -> None:
    """Check that starts ascend from 0 to the number of rows."""
    if starts.dtype != torch.int64 or starts.shape != (classes + 1,) or not rows.ndim:
        raise TypeError(f"starts of {label} are not one more than classes")
    if int(starts[0]) != 0 or int(starts[-1]) != len(rows) or bool((starts.diff() < 0).any()):
        raise TypeError(f"starts of {label} do not ascend from 0 to {len(rows)}")


def _check_summaries(columns: Mapping[str, Tensor], part: str, dim: int, classes: int) -> None:
    points, deviations = columns[f"{part}.points"], columns[f"{part}.deviations"]
    check_coding(points, columns.get(f"{part}.steps"), part)
    if points.dtype != torch.int8:
        _check_floats(points, 2, dim, f"prototypes of {part}", -_UNIT, _UNIT)
    elif points.shape[1] != dim or not points.numel():
        raise TypeError(f"prototypes of {part} have shape {list(points.shape)}")
    _check_counts(columns[f"{part}.counts"], len(points), f"prototypes of {part}")
    _check_floats(deviations, 2, dim, f"deviations of {part}", 0.0, _UNIT)
    if len(deviations) != classes:
        raise TypeError(f"deviations of {part} are not as many as classes that have prototypes")


def _check_layers(columns: Mapping[str, Tensor], group: str, dim: int) -> None:
    """Check the codes of prototypes in earlier layers."""
    codes, steps = columns[f"{group}.codes"], columns[f"{group}.steps"]
    if codes.dtype != torch.uint8 or codes.ndim != 3 or codes.shape[2] != -(-dim // 2) or not codes.numel():
        raise TypeError(f"codes of {group} have shape {list(codes.shape)}, {codes.dtype}")
    # Eight steps bound a number of a unit vector.
    _check_floats(steps, 2, codes.shape[1], f"steps of {group}", 0.0, 2 * _UNIT, (torch.float16,))
    if len(steps) != len(codes) or codes.shape[1] >= MAX_SPACES:
        raise TypeError(f"steps of {group} are not as many as prototypes, or of {codes.shape[1]} layers")


def _check_counts(counts: Tensor, number: int, label: str) -> None:
    if counts.dtype != torch.int64 or counts.shape != (number,):
        raise TypeError(f"{label} are not as many as their counts, or these are not whole numbers")
    if int(counts.min()) < 1 or int(counts.max()) > MAX_COUNT:
        raise TypeError(f"a count of {label} is below 1, or impossible")


def _check_floats(
    rows: Tensor,
    axes: int,
    dim: int | None,
    label: str,
    lower: float = -MAX_VALUE,
    upper: float = MAX_VALUE,
    kinds: tuple[torch.dtype, ...] = (torch.float16, torch.float32),
    may_be_empty: bool = False,
) -> None:
    shaped = rows.ndim == axes and dim in (None, rows.shape[-1]) and (may_be_empty or rows.numel() > 0)
    if rows.dtype not in kinds or not shaped:
        raise TypeError(f"{label} have shape {list(rows.shape)}, {rows.dtype}")
    for block in rows.split(_BLOCK):
        if not ((block >= lower) & (block <= upper)).all():  # false of NaN too
            raise TypeError(f"{label} are not finite, or beyond {lower:g} to {upper:g}")
