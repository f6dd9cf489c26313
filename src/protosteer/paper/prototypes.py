"""Prototypes: class means (Eq. 1), several centroids per class, and the anchors they become in training."""

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
    """Prototypes of one class: groups of its embeddings, in the order of their first members."""

    means: Tensor  # [c, D], not normalised
    deviations: Tensor  # [c, D]: population standard deviation within each group; 0 for a single image
    counts: Tensor  # int64 [c]: images of each group

    @property
    def variance(self) -> float:
        """Variance of the class's embeddings, averaged over dimensions: within plus between groups."""
        weights = (self.counts / self.counts.sum())[:, None]  # [c, 1]
        mean = (weights * self.means).sum(dim=0)  # [D]
        squares = self.deviations**2 + (self.means - mean) ** 2
        return float((weights * squares).sum(dim=0).mean())


def centroids(
    embeddings: Tensor, count: int, method: str = "spectral", assign: str = "discretize", seed: int = 0
) -> Centroids:
    """Make prototypes of one class's embeddings [n, D]; one of them is the class mean, Eq. 1.

    Args:
        embeddings: [n, D].
        count: C. There are fewer if the class has fewer distinct embeddings, or if clustering leaves a group empty.
        method: "spectral" (paper) or "kmeans", which is Euclidean, on the embeddings as they are.
        assign: How "spectral" turns eigenvectors into groups, "discretize" (authors' code) or "kmeans".
        seed: The same seed gives the same prototypes.

    Raises:
        DataError: The embeddings are not a matrix of finite numbers.
    """
    points = check_embeddings(embeddings)
    labels = _distinct(points, count)
    if labels is None:
        labels = group_labels(points, count, method, assign, seed)
    return _summarise(points, labels)


def check_embeddings(embeddings: Tensor) -> Floats:
    """Check embeddings [n, D]; return double precision, because small eigenvalue gaps decide the groups."""
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        shape = list(embeddings.shape)
        message = f"embeddings of a class have shape {shape}; give [images, dimensions], neither 0"
        raise DataError(message, code="bad-embedding-shape", shape=shape)
    points: Floats = embeddings.detach().cpu().float().numpy().astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(points).all(axis=1)).tolist()
    if bad:
        where = f"{len(bad)} of {len(points)} embeddings are not finite, the first in row {bad[0]}"
        message = f"{where}; check those images and the backbone's weights"
        raise DataError(message, code="embeddings-not-finite", rows=bad)
    return points


def _distinct(points: Floats, limit: int) -> Labels | None:
    """One group per distinct row, or None if there are more than `limit` of them."""
    groups: dict[bytes, int] = {}
    labels = np.empty(len(points), dtype=np.int64)
    for row, point in enumerate(points):
        labels[row] = groups.setdefault((point + 0.0).tobytes(), len(groups))  # + 0.0: -0.0 is 0.0
        if len(groups) > limit:
            return None
    return labels


def _summarise(points: Floats, labels: Labels) -> Centroids:
    """Mean, deviation and count of the groups that have members, ordered by first member."""
    _, first = np.unique(labels, return_index=True)
    groups = [points[labels == labels[row]] for row in np.sort(first)]
    means = np.stack([group.mean(axis=0) for group in groups])
    deviations = np.stack([group.std(axis=0) for group in groups])
    counts = torch.tensor([len(group) for group in groups], dtype=torch.int64)
    return Centroids(torch.from_numpy(means).float(), torch.from_numpy(deviations).float(), counts)


@dataclass(frozen=True)
class Anchors:
    """Value prototypes of earlier classes, perturbed at each step: mu_hat = mu + m * eps, eps ~ N(0, I)."""

    means: Tensor  # [A, D]: mu
    scales: Tensor  # [A, D], or [A, 1] for one number per prototype: m
    labels: Tensor  # [A]: classes as numbers

    @classmethod
    def of(cls, values: Sequence[Centroids], labels: Sequence[int], noise: str) -> Anchors | None:
        """Collect the value prototypes of classes; None if there are none.

        Args:
            values: The prototypes of each class.
            labels: The number of each class.
            noise: m: "cluster", the deviations within a prototype's group; "class", the variance of the class, one
                number; "none", 0.
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

    def sample(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw M = `count` prototypes with replacement, perturb and normalise them: [M, D], and labels [M]."""
        rows = torch.randint(len(self.means), (count,), generator=generator).to(self.means.device)
        noise = torch.randn(count, self.means.shape[1], generator=generator).to(self.means.device)
        return F.normalize(self.means[rows] + self.scales[rows] * noise, dim=1), self.labels[rows]

    def to(self, device: torch.device) -> Anchors:
        """Move to a device."""
        return Anchors(self.means.to(device), self.scales.to(device), self.labels.to(device))
