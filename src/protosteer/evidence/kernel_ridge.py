"""Kernel ridge regression of class membership on prototypes, with the arc-cosine kernel (Cho and Saul 2009).

Of several feature spaces, unit vectors are concatenated: the cosine of two such vectors is the mean of the spaces'
cosines. The kernel is the limit of infinitely many random ReLU features. The regression uses all prototypes while they are
few, else the span of evenly spaced landmarks (Nyström), and none where there are too many classes for landmarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.class_statistics import ClassStatistics

RIDGE = 0.03  # lambda in one feature space
RIDGE_SEVERAL = 0.05  # lambda in several, whose vectors are centred
MAX_PROTOTYPES = 4096  # the exact solve costs their number cubed, about two seconds for these
LANDMARKS, MIN_LANDMARKS_PER_CLASS = 2048, 10


class KernelRidge:
    """Ridge regression over all prototypes in S feature spaces; vectors of several spaces are centred first."""

    def __init__(self, spaces: Sequence[ClassStatistics]):
        self.statistics, several = spaces[0], len(spaces) > 1
        self.ridge = RIDGE_SEVERAL if several else RIDGE
        self.centre = torch.cat([s.centre if several else torch.zeros_like(s.centre) for s in spaces])  # [S * D]
        self.spaces = len(spaces)
        self.points = self.joint(torch.cat([statistics.points.double() for statistics in spaces], dim=1))
        targets = F.one_hot(self.statistics.owners, len(self.statistics.sizes)).double()
        self.weights, self.loo_scores = self._solve(targets)  # [P, C], [m, C]

    @staticmethod
    def of(spaces: Sequence[ClassStatistics]) -> KernelRidge | None:
        """Choose by the number of prototypes: exact, with landmarks, or none."""
        if len(spaces[0].owners) <= MAX_PROTOTYPES:
            return KernelRidge(spaces)
        landmarks = len(spaces[0].sizes) * MIN_LANDMARKS_PER_CLASS <= LANDMARKS
        return NystromRidge(spaces) if landmarks else None

    def joint(self, vectors: Tensor) -> Tensor:
        """Turn vectors [B, S * D] into unit vectors [B, S * D] of which each space has an equal part."""
        units = F.normalize((vectors - self.centre).unflatten(1, (self.spaces, -1)), dim=2)
        return units.flatten(1) / math.sqrt(self.spaces)

    def scores(self, embeddings: Tensor) -> Tensor:
        """[B, C] of unit vectors in each space, [B, S * D]."""
        return arc_cosine(self.joint(embeddings), self.points) @ self.weights

    def _solve(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the prototypes [P, C], and exact leave-one-out scores [m, C]."""
        kernel = torch.cat([arc_cosine(rows, self.points) for rows in self.points.split(512)])
        kernel.diagonal().add_(self.ridge / self.statistics.counts)
        factor = torch.linalg.cholesky(kernel)
        weights, rows = torch.cholesky_solve(targets, factor), self.statistics.loo_rows
        units = torch.zeros(len(kernel), len(rows), dtype=torch.double)
        units[rows, torch.arange(len(rows))] = 1.0
        diagonal = torch.linalg.solve_triangular(factor, units, upper=False).square().sum(dim=0)
        return weights, targets[rows] - weights[rows] / diagonal[:, None]


class NystromRidge(KernelRidge):
    """Ridge regression in the span of landmarks, which costs their number squared times that of all prototypes.

    An image that is left out is no longer learned from, but may still be a landmark.
    """

    def _solve(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.linspace(0, len(self.points) - 1, min(LANDMARKS, len(self.points))).round().long()
        landmarks, counts = self.points[chosen], self.statistics.counts[:, None]
        kernel = arc_cosine(landmarks, landmarks)
        kernel.diagonal().add_(1e-6)  # for landmarks that are equal
        root = torch.linalg.cholesky(kernel)
        across = torch.cat([arc_cosine(rows, landmarks) for rows in self.points.split(512)])
        features = torch.linalg.solve_triangular(root, across.T, upper=False).T  # [P, landmarks]
        moments = features.T @ (counts * features)
        moments.diagonal().add_(self.ridge)
        factor = torch.linalg.cholesky(moments)
        solved = torch.cholesky_solve(features.T @ (counts * targets), factor)
        self.points, rows = landmarks, self.statistics.loo_rows
        leverage = torch.linalg.solve_triangular(factor, features[rows].T, upper=False)
        leverage = leverage.square().sum(dim=0)[:, None]
        loo = (features[rows] @ solved - leverage * targets[rows]) / (1 - leverage).clamp(min=1e-9)
        return torch.linalg.solve_triangular(root.T, solved, upper=True), loo


def arc_cosine(a: Tensor, b: Tensor) -> Tensor:
    """[A, B] of unit vectors: (sin t + (pi - t) cos t) / pi, t the angle between them."""
    cosine = (a @ b.T).clamp(-1, 1)
    angle = cosine.acos()
    return (angle.sin() + (math.pi - angle) * cosine) / math.pi
