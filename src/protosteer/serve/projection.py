"""The map of the page: classes and pictures in two dimensions, by a principal component analysis.

A class is the direction of the mean of its value centroids, each of length 1 and weighted by its images; where
classes are read as evidence, of its points in the first view, which is the one that pictures are embedded in. The
two axes along which these directions vary most span the map, both on one scale, which the farthest class
fills to [-1, 1]. Which way an axis points is settled by its largest component, so that the same model always
gives the same map.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.errors import LearnerError
from protosteer.model.memory import Memory
from protosteer.rules import Reader

EDGE = 1.15  # where a picture is drawn that lies farther out than any class
NOTHING = 1e-6  # differences of unit vectors that are rounding, since records are in single precision


@dataclass(frozen=True)
class Projection:
    """Two axes, their origin and scale, and where the classes lie."""

    classes: list[tuple[str, str, float, float]]  # name, task, x, y
    origin: Tensor  # [D], the mean of the classes' directions
    axes: Tensor  # [2, D], each already divided by the scale; 0 where there is no such axis

    @classmethod
    def fit(cls, memory: Memory, reader: Reader) -> Projection:
        """Fit the map of a memory's classes, whose directions its reader has."""
        if not len(memory):
            raise LearnerError(
                "a model without classes has no map; learn a class first", code="nothing-learned"
            )
        directions = reader.class_directions()
        origin = directions.mean(dim=0)
        axes = _axes(directions - origin, origin)
        extent = float(((directions - origin) @ axes.T).abs().max())
        axes = axes / extent if extent > NOTHING else axes
        spots = _clip((directions - origin) @ axes.T, 1.0)
        classes = [
            (name, tasks[0], *spot) for (name, tasks), spot in zip(memory.owners.items(), spots, strict=True)
        ]
        return cls(classes, origin, axes)

    def place(self, embeddings: Tensor) -> list[tuple[float, float]]:
        """Where pictures lie, from their embeddings [B, D]; nothing is drawn beyond the edge."""
        directions = F.normalize(embeddings.detach().cpu().double(), dim=1)
        return _clip((directions - self.origin) @ self.axes.T, EDGE)


def _axes(centred: Tensor, origin: Tensor) -> Tensor:
    """[2, D]: the principal axes of the rows [C, D].

    Two classes vary along one axis and a single one along none. The origin's own direction then takes the
    free place: along it a picture moves away as it becomes unlike all the classes together.
    """
    axes = centred.new_zeros(2, centred.shape[1])
    place = 0
    for axis in [*_principal(centred), origin]:
        free = axis - axes.T @ (axes @ axis)
        if place < 2 and float(free.norm()) > NOTHING:
            axes[place] = F.normalize(free, dim=0)
            place += 1
    # of components that are equal up to rounding, the first
    decisive = (axes.abs() >= (1 - NOTHING) * axes.abs().amax(dim=1, keepdim=True)).int().argmax(dim=1)
    return axes * torch.where(axes.gather(1, decisive[:, None]) < 0, -1.0, 1.0)


def _principal(centred: Tensor) -> list[Tensor]:
    """The two longest axes, or fewer, from whichever matrix of inner products is the smaller."""
    count, dim = centred.shape
    if count <= dim:
        _, lengths, axes = torch.linalg.svd(centred, full_matrices=False)
    else:
        squares, columns = torch.linalg.eigh(centred.T @ centred)
        lengths, axes = squares.clamp(min=0).sqrt().flip(0), columns.T.flip(0)
    return [axis for axis, length in zip(axes[:2], lengths[:2], strict=True) if length > NOTHING]


def _clip(spots: Tensor, edge: float) -> list[tuple[float, float]]:
    return [(x, y) for x, y in spots.clamp(-edge, edge).tolist()]
