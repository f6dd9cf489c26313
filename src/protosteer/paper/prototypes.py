"""Prototypes: class means (paper, Eq. 1), several centroids per class, and what training does with them.

A class is described by the means of a few groups of its embeddings (`clustering.py`), raw, not normalised.
The value prototypes of all earlier classes take part in training the next task, sampled and perturbed anew at
each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.errors import DataError
from protosteer.paper.clustering import Floats, Labels, group_labels


@dataclass(frozen=True)
class Centroids:
    """Groups of one class's embeddings: `means` [c,D], `deviations` [c,D], `counts` int64 [c].

    `deviations` is the population standard deviation within the group, dimension by dimension;
    exactly 0 for a group of one image. Groups stand in the order of their first members.
    """

    means: Tensor
    deviations: Tensor
    counts: Tensor

    @property
    def variance(self) -> float:
        """Variance of the class's embeddings, averaged over dimensions: within plus between groups."""
        weights = (self.counts / self.counts.sum())[:, None]
        mean = (weights * self.means).sum(dim=0)
        squares = self.deviations**2 + (self.means - mean) ** 2
        return float((weights * squares).sum(dim=0).mean())


def centroids(
    embeddings: Tensor, count: int, method: str = "spectral", assign: str = "discretize", seed: int = 0
) -> Centroids:
    """At most `count` centroids of one class's embeddings [n,D], the same ones for the same seed; of 1, Eq.
    1.

    method: "spectral" (paper) or "kmeans", which is Euclidean, on the embeddings as they are.
    assign: how "spectral" turns eigenvectors into groups, "discretize" (public code) or "kmeans".
    There are fewer than `count` when the class has fewer distinct embeddings, each of which is then a
    centroid, and when the clustering leaves a group empty.
    Above `clustering.DENSE_LIMIT` images "spectral" uses similarities that are not clipped;
    `clustering.factored_labels` says when that can be noticed.
    """
    points = check_embeddings(embeddings)
    labels = _distinct(points, count)
    if labels is None:
        labels = group_labels(points, count, method, assign, seed)
    return _summarise(points, labels)


def check_embeddings(embeddings: Tensor) -> Floats:
    """Double precision, because small eigenvalue gaps decide the groups."""
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        shape = list(embeddings.shape)
        raise DataError(f"embeddings of a class have shape {shape}; give [images, dimensions], neither 0")
    points: Floats = embeddings.detach().cpu().float().numpy().astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if len(bad):
        where = f"{len(bad)} of {len(points)} embeddings are not finite, the first in row {bad[0]}"
        raise DataError(f"{where}; check those images and the backbone's weights")
    return points


def _distinct(points: Floats, limit: int) -> Labels | None:
    """One group per distinct row, or None as soon as there are more than `limit` of them."""
    seen: dict[bytes, int] = {}
    labels = np.empty(len(points), dtype=np.int64)
    for row, point in enumerate(points):
        labels[row] = seen.setdefault((point + 0.0).tobytes(), len(seen))  # + 0.0: -0.0 is 0.0
        if len(seen) > limit:
            return None
    return labels


def _summarise(points: Floats, labels: Labels) -> Centroids:
    """Statistics of the groups that have members, ordered by first member; no group, no row: no NaN."""
    _, first = np.unique(labels, return_index=True)
    groups = [points[labels == labels[row]] for row in np.sort(first)]
    means = np.stack([group.mean(axis=0) for group in groups])
    deviations = np.stack([group.std(axis=0) for group in groups])
    counts = torch.tensor([len(group) for group in groups], dtype=torch.int64)
    return Centroids(torch.from_numpy(means).float(), torch.from_numpy(deviations).float(), counts)


@dataclass(frozen=True)
class Anchors:
    """Value prototypes of earlier classes and the scale m of their noise: mu_hat = mu + m * eps, eps ~ N(0, I)."""

    means: Tensor  # [A, D]
    scales: Tensor  # [A, D], or [A, 1] for one number per prototype
    labels: Tensor  # [A]: classes as numbers

    @classmethod
    def of(cls, values: Sequence[Centroids], labels: Sequence[int], noise: str) -> Anchors | None:
        """Collect the value prototypes of classes; None if there are none.

        Args:
            values: The prototypes of each class.
            labels: The number of each class.
            noise: m: "cluster", the deviations within a prototype's group; "class", the variance of the class;
                "none", 0.
        """
        if not values:
            return None
        sizes = torch.tensor([len(one.means) for one in values])
        if noise == "cluster":
            scales = torch.cat([one.deviations for one in values])
        else:
            per_class = [one.variance if noise == "class" else 0.0 for one in values]
            scales = torch.tensor(per_class).repeat_interleave(sizes)[:, None]
        means = torch.cat([one.means for one in values])
        return cls(means, scales, torch.tensor(labels).repeat_interleave(sizes))

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw `count` prototypes with replacement, perturb and normalise them: [count, D], and labels."""
        rows = torch.randint(len(self.means), (count,)).to(self.means.device)
        noise = torch.randn(count, self.means.shape[1]).to(self.means.device)
        return F.normalize(self.means[rows] + self.scales[rows] * noise, dim=1), self.labels[rows]

    def to(self, device: torch.device) -> Anchors:
        """Move to a device."""
        return Anchors(self.means.to(device), self.scales.to(device), self.labels.to(device))
