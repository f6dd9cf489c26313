"""Model files of earlier versions, mapped to the tensors of today's format.

Format 1 (CPP inference) and format 2 (the default classifier) keep each class by itself, as
`tasks.T.classes.C.PART`. Format 3, for 1,000 classes and more, and format 4 keep columns as today, of the last layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from protosteer.evidence.prototype_summary import ClassSummary, unpack_prototypes
from protosteer.model.class_table import GROUPS, SUMMARIES
from protosteer.model.validation import check_coding

FORMATS = (1, 2, 3, 4)
# Single images that lead the prototypes of a class of many, in files from before prototypes had eight bits.
EARLY_EXACT = 5


def upgrade(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file of an earlier format as today's format has them.

    The header was checked, the tensors were not: a KeyError or TypeError says what is absent or does not fit.
    """
    if header["format"] in (3, 4):
        return dict(tensors)
    places = ((t, c) for t, task in enumerate(header["tasks"]) for c in range(len(task["classes"])))
    classes = [_class(tensors, f"tasks.{t}.classes.{c}.") for t, c in places]
    upgraded = {name: tensor for name, tensor in tensors.items() if ".classes." not in name}
    for group, fields in GROUPS.items():
        owners = [columns for columns in classes if fields[0] in columns]
        lengths = [len(columns[fields[0]]) if fields[0] in columns else 0 for columns in classes]
        if owners:
            upgraded[f"starts.{group}"] = torch.tensor([0, *itertools.accumulate(lengths)])
        for field in (field for field in fields if owners and field in owners[0]):
            upgraded[f"classes.{field}"] = _join_columns([columns[field] for columns in owners], field)
    return upgraded


def _class(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the columns of one class, each with an axis of rows; prototypes in single precision."""
    columns = {field: tensors[prefix + field] for field in GROUPS["values"]}
    columns |= {name: tensors[prefix + name] for name in ("held_out", "seen") if prefix + name in tensors}
    has_half_precision = tensors.get(f"{prefix}plain.points", torch.empty(0)).dtype == torch.float16
    for part in SUMMARIES:
        if f"{prefix}{part}.points" in tensors:
            points, steps = tensors[f"{prefix}{part}.points"], tensors.get(f"{prefix}{part}.steps")
            check_coding(points, steps, part)
            columns[f"{part}.points"] = unpack_prototypes(points, steps)
            columns[f"{part}.counts"] = tensors[f"{prefix}{part}.counts"]
            columns[f"{part}.deviations"] = tensors[f"{prefix}{part}.deviations"][None]
    if "plain.points" not in columns:
        columns["keys"] = tensors[f"{prefix}keys"]
    elif has_half_precision and "domain.points" in columns:
        columns |= dict(_reorder_early(columns))
    for field, column in columns.items():
        if not column.ndim:
            raise TypeError(f"{field} of a class is a single number")
    return columns


def _reorder_early(columns: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the prototypes of a large class in the order of today: `EARLY_EXACT` images, then groups by size.

    Where groups of one image follow in one of the two spaces, they would be taken for images that the other space
    lacks: they move to the end.
    """
    parts = [
        ClassSummary(columns[f"{part}.points"], columns[f"{part}.counts"], columns[f"{part}.deviations"])
        for part in SUMMARIES
    ]
    for part, summary in zip(SUMMARIES, parts, strict=True):
        if summary.counts.dtype != torch.int64 or summary.counts.shape != summary.points.shape[:1]:
            raise TypeError(f"counts of {part} are not as many as prototypes, or not whole numbers")
    if parts[0].num_exact == parts[1].num_exact:
        return
    for part, summary in zip(SUMMARIES, parts, strict=True):
        groups = summary.counts[EARLY_EXACT:].argsort(descending=True, stable=True) + EARLY_EXACT
        rows = torch.cat([torch.arange(len(summary.counts))[:EARLY_EXACT], groups])
        yield f"{part}.points", summary.points[rows]
        yield f"{part}.counts", summary.counts[rows]


def _join_columns(parts: Sequence[Tensor], field: str) -> Tensor:
    kinds = {part.dtype for part in parts}
    if len({part.shape[1:] for part in parts}) > 1 or (len(kinds) > 1 and kinds != {torch.float16, torch.float32}):
        raise TypeError(f"{field} of classes differ in width or kind")
    return torch.cat(list(parts))
