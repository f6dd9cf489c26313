"""Checks of a method's saved state, which may be another's: a run folder is shared, evaluated again, resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from protosteer.model.schema import check

if TYPE_CHECKING:
    from protosteer.methods.base import Method

_MAX_ITEMS = 10**6


def checked_tasks(header: Mapping[str, Any]) -> list[list[str]]:
    """Return the classes of each task that a state's header names; raises TypeError."""
    check(header, {"tasks": [[4096, 0, _MAX_ITEMS], 1, _MAX_ITEMS]}, "the state's")
    tasks: list[list[str]] = header["tasks"]
    return tasks


def check_tensors(method: Method, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless tensors have the types and shapes of a new method's, but for sizes that grow.

    Args:
        method: The method, whose `tasks` are restored already.
        tensors: What its `state_dict` returned.
    """
    fresh = type(method)(method.backbone, method.settings)
    rows = {"per class": len(method.classes), "per task": len(method.tasks)}
    for name, growth in method.state_fields.items():
        if isinstance(value := getattr(fresh, name), Tensor):
            found = tensors[name]
            shape = [old or new for old, new in zip(value.shape, found.shape, strict=True)]
            if value.ndim and not len(value) and growth in (*rows, *method.state_fields):
                shape[0] = rows[growth] if growth in rows else len(tensors[growth])
            if found.dtype != value.dtype or [*found.shape] != shape or not found.isfinite().all():
                raise ValueError(f"{name} is {found.dtype} {list(found.shape)}")
            if name == growth and not ((found >= 0) & (found < len(method.classes))).all():
                raise ValueError(f"{name} has numbers of no class")
