"""Prototypes: class means (Eq. 1), several centroids per class, and the anchors of the loss."""

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
    counts: Tensor  # int64 [c]: number of images in each group

    @property
    def variance(self) -> float:
        """Variance of the class's embeddings, averaged over dimensions: that within groups plus that between them."""
        weights = (self.counts / self.counts.sum())[:, None]  # [c, 1]
        mean = (weights * self.means).sum(dim=0)  # [D]
        squares = self.deviations**2 + (self.means - mean) ** 2
        return float((weights * squares).sum(dim=0).mean())


def centroids(
    embeddings: Tensor, count: int, method: str = "spectral", assign: str = "discretize", seed: int = 0
) -> Centroids:
    """Compute the prototypes of one class from its embeddings [n, D]; with count 1, the class mean (Eq. 1).

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
    labels = _label_distinct(points, count)
    if labels is None:
        labels = group_labels(points, count, method, assign, seed)
    return _summarise(points, labels)


def check_embeddings(embeddings: Tensor) -> Floats:
    """Check embeddings [n, D] and return them in double precision, because small eigenvalue gaps decide the groups."""
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        shape = list(embeddings.shape)
        message = f"embeddings of a class have shape {shape}; give [images, dimensions], neither 0"
        raise DataError(message, code="bad-embedding-shape", shape=shape)
    points: Floats = embeddings.detach().cpu().float().numpy().astype(np.float64)
    rows = np.flatnonzero(~np.isfinite(points).all(axis=1)).tolist()
    if rows:
        count = f"{len(rows)} of {len(points)}"
        message = f"{count} embeddings are not finite, the first in row {rows[0]}; check those images and the backbone's weights"
        raise DataError(message, code="embeddings-not-finite", rows=rows)
    return points


def _label_distinct(points: Floats, limit: int) -> Labels | None:
    """Label each row [n, D] by its distinct value, [n]; None if there are more than `limit` distinct rows."""
    groups: dict[bytes, int] = {}
    labels = np.empty(len(points), dtype=np.int64)
    for row, point in enumerate(points):
        labels[row] = groups.setdefault((point + 0.0).tobytes(), len(groups))  # + 0.0: -0.0 is 0.0
        if len(groups) > limit:
            return None
    return labels


def _summarise(points: Floats, labels: Labels) -> Centroids:
    """Compute mean, deviation and count of each group that labels [n] name, in the order of first members."""
    _, first_rows = np.unique(labels, return_index=True)
    groups = [points[labels == labels[row]] for row in np.sort(first_rows)]
    means = np.stack([group.mean(axis=0) for group in groups])
    deviations = np.stack([group.std(axis=0) for group in groups])
    counts = torch.tensor([len(group) for group in groups], dtype=torch.int64)
    return Centroids(torch.from_numpy(means).float(), torch.from_numpy(deviations).float(), counts)


@dataclass(frozen=True)
class Anchors:
    """Value prototypes of earlier classes, perturbed at every step: mu_hat = mu + m * eps, eps ~ N(0, I)."""

    means: Tensor  # [A, D]: mu
    scales: Tensor  # m: [A, D], or [A, 1] if one number per prototype
    labels: Tensor  # [A]: class of each

    @classmethod
    def of(cls, values: Sequence[Centroids], labels: Sequence[int], noise: str) -> Anchors | None:
        """Collect the value prototypes of classes; None if there are none.

        Args:
            values: The prototypes of each class.
            labels: The number of each class.
            noise: What m is. "cluster": the deviations within the prototype's group (authors' code). "class": the variance
                of the class, one number (paper's text). "none": 0.
        """
        if not values:
            return None
        sizes = torch.tensor([len(prototypes.means) for prototypes in values])
        if noise == "cluster":
            scales = torch.cat([prototypes.deviations for prototypes in values])
        else:
            per_class = [prototypes.variance if noise == "class" else 0.0 for prototypes in values]
            scales = torch.tensor(per_class).repeat_interleave(sizes)[:, None]
        means = torch.cat([prototypes.means for prototypes in values])
        return cls(means, scales, torch.tensor(labels).repeat_interleave(sizes))

    def sample(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw M = `count` prototypes with replacement, perturb and normalise them: return [M, D] and labels [M]."""
        rows = torch.randint(len(self.means), (count,), generator=generator).to(self.means.device)
        noise = torch.randn(count, self.means.shape[1], generator=generator).to(self.means.device)
        return F.normalize(self.means[rows] + self.scales[rows] * noise, dim=1), self.labels[rows]

    def to(self, device: torch.device) -> Anchors:
        """Return the anchors on a device."""
        return Anchors(self.means.to(device), self.scales.to(device), self.labels.to(device))
