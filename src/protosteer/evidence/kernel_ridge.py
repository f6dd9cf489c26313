"""Kernel ridge regression on the points of all classes, with the arc-cosine kernel (Cho and Saul 2009).

Over all points while they are few, else in the span of some of them, and in the end not at all.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.class_statistics import Space

RIDGE = 0.03  # lambda
RIDGE_LIMIT = 4096  # points; the solve costs their number cubed, two seconds or so for these
LANDMARKS, LANDMARKS_PER_CLASS = 2048, 10  # for more points, as long as there are so many of them per class


class Ridge:
    """Kernel ridge regression of class membership on the points."""

    def __init__(self, space: Space):
        self.space = space
        self.points = F.normalize(space.points.double(), dim=1)
        targets = F.one_hot(space.owners, len(space.sizes)).double()
        self.weights, self._left_out = self._solve(targets)  # [P, C], [m, C]

    @staticmethod
    def of(space: Space) -> Ridge | None:
        """Over all points, or with landmarks, or not at all: whatever their number allows."""
        if len(space.owners) <= RIDGE_LIMIT:
            return Ridge(space)
        return Landmarks(space) if len(space.sizes) * LANDMARKS_PER_CLASS <= LANDMARKS else None

    def scores(self, embeddings: Tensor) -> Tensor:
        return arc_cosine(embeddings, self.points) @ self.weights

    def left_out(self) -> Tensor:
        """[m, C]: scores of the images that are left out, each as if it had not been learned."""
        return self._left_out

    def _solve(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the points, and the scores of what is left out: by the ridge over all others, exactly."""
        kernel = torch.cat([arc_cosine(some, self.points) for some in self.points.split(512)])
        kernel.diagonal().add_(RIDGE / self.space.counts)
        factor = torch.linalg.cholesky(kernel)
        weights, rows = torch.cholesky_solve(targets, factor), self.space.left_out
        places = torch.zeros(len(kernel), len(rows), dtype=torch.double)
        places[rows, torch.arange(len(rows))] = 1.0
        diagonal = torch.linalg.solve_triangular(factor, places, upper=False).square().sum(dim=0)
        return weights, targets[rows] - weights[rows] / diagonal[:, None]


class Landmarks(Ridge):
    """The same in the span of some of the points (Nyström), which costs their number squared times that of all.

    What is left out is no longer learned from, but may still be a landmark.
    """

    def _solve(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.linspace(0, len(self.points) - 1, min(LANDMARKS, len(self.points))).round().long()
        landmarks, counts = self.points[chosen], self.space.counts[:, None]
        kernel = arc_cosine(landmarks, landmarks)
        kernel.diagonal().add_(1e-6)  # for landmarks that are equal
        root = torch.linalg.cholesky(kernel)
        across = torch.cat([arc_cosine(some, landmarks) for some in self.points.split(512)])
        features = torch.linalg.solve_triangular(root, across.T, upper=False).T  # [P, landmarks]
        moments = features.T @ (counts * features)
        moments.diagonal().add_(RIDGE)
        factor = torch.linalg.cholesky(moments)
        solved = torch.cholesky_solve(features.T @ (counts * targets), factor)
        self.points, rows = landmarks, self.space.left_out
        seen = torch.linalg.solve_triangular(factor, features[rows].T, upper=False)
        leverage = seen.square().sum(dim=0)[:, None]
        left_out = (features[rows] @ solved - leverage * targets[rows]) / (1 - leverage).clamp(min=1e-9)
        return torch.linalg.solve_triangular(root.T, solved, upper=True), left_out


def arc_cosine(a: Tensor, b: Tensor) -> Tensor:
    """[A, B] of unit vectors: (sin t + (pi - t) cos t) / pi, t the angle between them."""
    cosine = (a @ b.T).clamp(-1, 1)
    angle = cosine.acos()
    return (angle.sin() + (math.pi - angle) * cosine) / math.pi
