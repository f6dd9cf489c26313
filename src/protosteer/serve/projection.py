"""The class map: classes and images in two dimensions, by principal component analysis.

A class is a direction that its model's reader defines. The map is spanned by the two axes along which these
directions vary most, both on one scale, on which the farthest class is at 1 or -1. The largest component of an axis
settles its sign, so that the same model always gives the same map. While a service runs, each new map is turned and
mirrored to the one before (orthogonal Procrustes), so that classes stay where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from protosteer.errors import LearnerError
from protosteer.model.memory import Memory
from protosteer.rules import Reader

EDGE = 1.15  # coordinate at which images beyond all classes are drawn
ROUNDING = 1e-6  # differences of unit vectors that are rounding errors of single precision


@dataclass(frozen=True)
class Projection:
    """Two axes with origin and scale, and the coordinates of the classes."""

    classes: list[tuple[str, str, float, float]]  # name, task, x, y
    origin: Tensor  # [D], the mean of the classes' directions
    axes: Tensor  # [2, D], each already divided by the scale; 0 where there is no such axis

    @classmethod
    def fit(cls, memory: Memory, reader: Reader, earlier_map: Projection | None = None) -> Projection:
        """Fit the map of a memory's classes, whose directions its reader has; turn it to the earlier map."""
        if not len(memory):
            raise LearnerError("a model without classes has no map; learn a class first", code="nothing-learned")
        directions = reader.class_directions()
        origin = directions.mean(dim=0)
        axes = _axes(directions - origin, origin)
        coordinates = (directions - origin) @ axes.T
        if earlier_map is not None:
            turn = earlier_map.turn_of(reader.index.classes, coordinates)
            axes, coordinates = turn.T @ axes, coordinates @ turn
        extent = float(coordinates.abs().max())
        scale = 1 / extent if extent > ROUNDING else 1.0
        spots = _clip(coordinates * scale, 1.0)
        owners = memory.owners
        classes = [(name, owners[name][0], *spot) for name, spot in zip(reader.index.classes, spots, strict=True)]
        return cls(classes, origin, axes * scale)

    def turn_of(self, names: Sequence[str], coordinates: Tensor) -> Tensor:
        """Find the rotation or reflection [2, 2] that brings coordinates [C, 2] of classes closest to this map's."""
        places = {name: (x, y) for name, _, x, y in self.classes}
        rows = [row for row, name in enumerate(names) if name in places]
        if len(rows) < 2:
            return torch.eye(2, dtype=coordinates.dtype)
        targets = torch.tensor([places[names[row]] for row in rows], dtype=coordinates.dtype)
        left, _, right = torch.linalg.svd(coordinates[rows].T @ targets)
        return left @ right

    def place(self, embeddings: Tensor) -> list[tuple[float, float]]:
        """Project embeddings [B, D] to coordinates, clipped at the edge."""
        directions = normalize(embeddings.detach().cpu().double(), dim=1)
        return _clip((directions - self.origin) @ self.axes.T, EDGE)


def _axes(offsets: Tensor, origin: Tensor) -> Tensor:
    """Compute the principal axes [2, D] of the rows [C, D].

    Two classes vary along one axis and a single one along none. The direction of the origin then fills the free
    axis: along it an image moves away as it becomes unlike all classes.
    """
    axes = offsets.new_zeros(2, offsets.shape[1])
    count = 0
    for axis in [*_principal(offsets), origin]:
        remainder = axis - axes.T @ (axes @ axis)
        if count < 2 and float(remainder.norm()) > ROUNDING:
            axes[count] = normalize(remainder, dim=0)
            count += 1
    # The sign is settled by the largest component; of equal ones, up to rounding, by the first.
    decisive = (axes.abs() >= (1 - ROUNDING) * axes.abs().amax(dim=1, keepdim=True)).int().argmax(dim=1)
    return axes * torch.where(axes.gather(1, decisive[:, None]) < 0, -1.0, 1.0)


def _principal(offsets: Tensor) -> list[Tensor]:
    """Return the two longest axes, or fewer, from the smaller of the two Gram matrices."""
    count, dim = offsets.shape
    if count <= dim:
        _, lengths, axes = torch.linalg.svd(offsets, full_matrices=False)
    else:
        squares, columns = torch.linalg.eigh(offsets.T @ offsets)
        lengths, axes = squares.clamp(min=0).sqrt().flip(0), columns.T.flip(0)
    return [axis for axis, length in zip(axes[:2], lengths[:2], strict=True) if length > ROUNDING]


def _clip(spots: Tensor, edge: float) -> list[tuple[float, float]]:
    return [(x, y) for x, y in spots.clamp(-edge, edge).tolist()]
