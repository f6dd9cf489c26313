"""Kernel ridge regression of class membership on prototypes, with the arc-cosine kernel (Cho and Saul 2009).

Of several feature spaces, unit vectors are concatenated: the cosine of two such vectors is the mean of the spaces'
cosines. The kernel is the limit of infinitely many random ReLU features. Few prototypes are
all used. Many are replaced by the span of evenly spaced landmarks (Nyström). Very many classes get no regression.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.class_statistics import ClassStatistics, insert_row

RIDGE = 0.03  # lambda in one feature space
RIDGE_SEVERAL = 0.05  # lambda in several, whose vectors are centred
MAX_PROTOTYPES = 4096  # the exact solve costs their number cubed, about two seconds for these
LANDMARKS, MIN_LANDMARKS_PER_CLASS = 2048, 10


class _Update(NamedTuple):
    """The change by one image: of the inverse by a direction and a pivot, of the weights by the product of column and row."""

    direction: Tensor  # [p]
    pivot: Tensor
    column: Tensor  # [p + 1], or of landmarks [P]
    row: Tensor  # [C]


class KernelRidge:
    """Ridge regression over all prototypes in S feature spaces; vectors of several spaces are centred first."""

    def __init__(self, spaces: Sequence[ClassStatistics]):
        self.statistics, several = spaces[0], len(spaces) > 1
        self.ridge = RIDGE_SEVERAL if several else RIDGE
        self.centre = torch.cat([s.centre if several else torch.zeros_like(s.centre) for s in spaces])  # [S * D]
        self.spaces = len(spaces)
        self.points = self.joint(torch.cat([statistics.points.double() for statistics in spaces], dim=1))
        targets = F.one_hot(self.statistics.owners, len(self.statistics.sizes)).double()
        self.factor: Tensor | None = None  # Cholesky factor of the solved matrix; None: see `release`
        self._solved, self.loo_scores = self._solve(targets)  # [P, C], [m, C]
        self._updates: list[_Update] = []  # images of `with_image`

    @staticmethod
    def of(spaces: Sequence[ClassStatistics]) -> KernelRidge | None:
        """Fit the exact regression, one with landmarks, or none, by the number of prototypes."""
        if len(spaces[0].owners) <= MAX_PROTOTYPES:
            return KernelRidge(spaces)
        landmarks = len(spaces[0].sizes) * MIN_LANDMARKS_PER_CLASS <= LANDMARKS
        return NystromRidge(spaces) if landmarks else None

    def joint(self, vectors: Tensor) -> Tensor:
        """Turn vectors [B, S * D] into unit vectors [B, S * D] in which all spaces have the same length."""
        units = F.normalize((vectors - self.centre).unflatten(1, (self.spaces, -1)), dim=2)
        return units.flatten(1) / math.sqrt(self.spaces)

    def scores(self, embeddings: Tensor) -> Tensor:
        """Predict class membership [B, C] of vectors [B, S * D], unit vectors in each space."""
        return self._weigh(arc_cosine(self.joint(embeddings), self.points))

    @property
    def weights(self) -> Tensor:
        """[P, C]: the weights of the prototypes."""
        return self._weigh(torch.eye(len(self.points), dtype=torch.double)) if self._updates else self._solved

    def _weigh(self, kernel: Tensor) -> Tensor:
        """Multiply [B, P] by the weights [P, C]: the solved ones and their updates of rank one, which are not summed."""
        scores = kernel[:, : len(self._solved)] @ self._solved
        for update in self._updates:
            scores += torch.outer(kernel[:, : len(update.column)] @ update.column, update.row)
        return scores

    def release(self) -> None:
        """Free the memory that only `with_image` needs."""
        self.factor = None

    def with_image(self, embedding: Tensor, count: float, label: int, is_new: bool) -> KernelRidge:
        """Return the regression with one more prototype, [S * D], of `count` images of class `label`.

        Nothing is solved again: one more row and column change an inverse in closed form. The centre and leave-one-out
        scores stay the same. `is_new`: insert the class.
        """
        updated, point = copy.copy(self), self.joint(embedding[None])
        if is_new:
            zeros = self._solved.new_zeros(len(self._solved))
            updated._solved = insert_row(self._solved.T, label, zeros).T
            updated._updates = [u._replace(row=insert_row(u.row, label, zeros[0])) for u in self._updates]
        target = F.one_hot(torch.tensor(label), updated._solved.shape[1]).double()
        updated._extend(point, arc_cosine(self.points, point)[:, 0], count, target)
        return updated

    def _extend(self, point: Tensor, across: Tensor, count: float, target: Tensor) -> None:
        direction = self._inverse_times(across)
        pivot = 1 + self.ridge / count - across @ direction
        column, row = torch.cat([-direction, direction.new_ones(1)]), (target - self._weigh(across[None])[0]) / pivot
        self._updates = [*self._updates, _Update(direction, pivot, column, row)]
        self.points = torch.cat([self.points, point])

    def _inverse_times(self, vector: Tensor) -> Tensor:
        """Multiply [P] by the inverse of the solved matrix, updates included."""
        assert self.factor is not None
        solved = _solve_factored(self.factor, vector[: len(self.factor)])
        for direction, pivot, *_ in self._updates:
            entry = (vector[len(direction)] - direction @ vector[: len(direction)]) / pivot
            solved = torch.cat([solved - entry * direction, entry[None]])
        return solved

    def _solve(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Solve for targets [P, C]: weights of the prototypes [P, C] and exact leave-one-out scores [m, C]."""
        kernel = torch.cat([arc_cosine(rows, self.points) for rows in self.points.split(512)])
        kernel.diagonal().add_(self.ridge / self.statistics.counts)
        self.factor = factor = torch.linalg.cholesky(kernel)
        weights, rows = torch.cholesky_solve(targets, factor), self.statistics.loo_rows
        units = torch.zeros(len(kernel), len(rows), dtype=torch.double)
        units[rows, torch.arange(len(rows))] = 1.0
        diagonal = torch.linalg.solve_triangular(factor, units, upper=False).square().sum(dim=0)
        return weights, targets[rows] - weights[rows] / diagonal[:, None]


class NystromRidge(KernelRidge):
    """Ridge regression in the span of landmarks, which costs their number squared times that of all prototypes.

    In leave-one-out, an image is not learned from but may still be a landmark.
    """

    _root: Tensor | None

    def release(self) -> None:
        """See `KernelRidge.release`."""
        self.factor = self._root = None

    def _extend(self, point: Tensor, across: Tensor, count: float, target: Tensor) -> None:
        assert self._root is not None
        feature = torch.linalg.solve_triangular(self._root, across[:, None], upper=False)[:, 0]
        direction = self._inverse_times(feature)
        pivot = 1 / count + feature @ direction
        column = torch.linalg.solve_triangular(self._root.T, direction[:, None], upper=True)[:, 0]
        row = (target - self._weigh(across[None])[0]) / pivot
        self._updates = [*self._updates, _Update(direction, pivot, column, row)]

    def _inverse_times(self, vector: Tensor) -> Tensor:
        assert self.factor is not None
        solved = _solve_factored(self.factor, vector)
        for direction, pivot, *_ in self._updates:
            solved = solved - direction * (direction @ vector / pivot)
        return solved

    def _solve(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.linspace(0, len(self.points) - 1, min(LANDMARKS, len(self.points))).round().long()
        landmarks, counts = self.points[rows], self.statistics.counts[:, None]
        kernel = arc_cosine(landmarks, landmarks)
        kernel.diagonal().add_(1e-6)  # for equal landmarks
        root = torch.linalg.cholesky(kernel)
        across = torch.cat([arc_cosine(points, landmarks) for points in self.points.split(512)])
        features = torch.linalg.solve_triangular(root, across.T, upper=False).T  # [P, landmarks]
        moments = features.T @ (counts * features)
        moments.diagonal().add_(self.ridge)
        self.factor = factor = torch.linalg.cholesky(moments)
        self._root = root
        solved = torch.cholesky_solve(features.T @ (counts * targets), factor)
        self.points, rows = landmarks, self.statistics.loo_rows
        leverage = torch.linalg.solve_triangular(factor, features[rows].T, upper=False)
        leverage = leverage.square().sum(dim=0)[:, None]
        loo = (features[rows] @ solved - leverage * targets[rows]) / (1 - leverage).clamp(min=1e-9)
        return torch.linalg.solve_triangular(root.T, solved, upper=True), loo


def _solve_factored(factor: Tensor, vector: Tensor) -> Tensor:
    """Solve L L^T x = v for one vector [P]; `torch.cholesky_solve` would copy the factor [P, P] first."""
    forward = torch.linalg.solve_triangular(factor, vector[:, None], upper=False)
    return torch.linalg.solve_triangular(factor.mT, forward, upper=True)[:, 0]


def arc_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Compute the kernel (sin t + (pi - t) cos t) / pi, [A, B], of unit vectors [A, D] and [B, D] at an angle t."""
    cosine = (a @ b.T).clamp(-1, 1)
    angle = cosine.acos()
    return (angle.sin() + (math.pi - angle) * cosine) / math.pi
