"""Prototypes: class means (paper, Eq. 1), several centroids per class, and what training does with them.

A class is described by the means of a few groups of its embeddings (`clustering.py`), raw, not normalised.
The value prototypes of all earlier classes take part in training the next task, sampled and perturbed anew at
each step.
"""

from __future__ import annotations

from collections.abc import Mapping
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

    def packed(self) -> dict[str, Tensor]:
        """For a file, in half precision where that is exact."""
        return {
            "means": narrowed(self.means),
            "deviations": narrowed(self.deviations),
            "counts": self.counts,
        }


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
    points = _checked(embeddings)
    labels = _distinct(points, count)
    if labels is None:
        labels = group_labels(points, count, method, assign, seed)
    return _summarise(points, labels)


def _checked(embeddings: Tensor) -> Floats:
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
class Sketch:
    """One class in one space, as unit vectors: `points` [k, D], `counts` int64 [k] of images behind each.

    `deviations` [D] is the root mean square of what lies between images and their points, dimension by
    dimension. A point is a multiple of -127 to 127 of its own step, and steps and deviations are numbers that
    half precision holds, so that a file need not keep more than eight bits per number.
    """

    points: Tensor
    counts: Tensor
    deviations: Tensor

    @property
    def single(self) -> int:
        """How many points are images as they are; they come first, the same images in every space."""
        few = len(self.points) == int(self.counts.sum())
        return len(self.points) if few else min(SINGLE, int((self.counts == 1).cumprod(0).sum()))

    def packed(self) -> dict[str, Tensor]:
        """For a file."""
        return {**packed_points(self.points), "counts": self.counts, "deviations": narrowed(self.deviations)}

    @classmethod
    def unpacked(cls, parts: Mapping[str, Tensor]) -> Sketch:
        points = unpacked_points(parts["points"], parts.get("steps"))
        return cls(points, parts["counts"], parts["deviations"].float())


def packed_points(points: Tensor) -> dict[str, Tensor]:
    """Points [k, D] of sketches for a file: eight bits and steps, where that is exact."""
    steps = _steps(points)
    codes = _multiples(points, steps)
    if not torch.equal(codes * steps, points):  # made otherwise
        return {"points": narrowed(points)}
    return {"points": codes.to(torch.int8), "steps": steps[:, 0].half()}


def unpacked_points(points: Tensor, steps: Tensor | None) -> Tensor:
    if points.dtype != torch.int8 or steps is None:
        return points.float()
    return points.float() * steps.float()[:, None]


# A class is sketched by at most so many points, of which so many are images as they are: what the evidence
# would be without them is known exactly, and calibrates it.
POINTS, SINGLE = 40, 10


def sketch(embeddings: Tensor, seed: int = 0) -> Sketch:
    """A class's embeddings [n, D] as they are while they are few, else a few of them and groups of the rest."""
    units = F.normalize(torch.from_numpy(_checked(embeddings)), dim=1).float()
    if len(units) <= POINTS:
        return Sketch(coded(units), torch.ones(len(units), dtype=torch.int64), torch.zeros(units.shape[1]))
    chosen = torch.zeros(len(units), dtype=torch.bool).index_fill_(0, single_rows(len(units), seed), True)
    groups = centroids(units[~chosen], POINTS - SINGLE, "kmeans", seed=seed % 2**32)
    ones = torch.ones(SINGLE, dtype=torch.int64)
    within = (groups.deviations**2 * groups.counts[:, None]).sum(dim=0) / len(units)
    return Sketch(
        coded(torch.cat([units[chosen], groups.means])),
        torch.cat([ones, groups.counts]),
        halved(within.sqrt()),
    )


def single_rows(count: int, seed: int) -> Tensor:
    """Of so many images, the rows of those that their sketch keeps as they are, ascending."""
    if count <= POINTS:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:SINGLE].sort().values


def halved(numbers: Tensor) -> Tensor:
    """Rounded to what half precision holds, in single precision."""
    return numbers.half().float()


def narrowed(numbers: Tensor) -> Tensor:
    """In half precision, where that holds them."""
    return numbers.half() if numbers.dtype == torch.half or torch.equal(halved(numbers), numbers) else numbers


def coded(points: Tensor) -> Tensor:
    """Rounded to multiples, up to 127, of a step for each point."""
    steps = _steps(points)
    return _multiples(points, steps) * steps


def _steps(points: Tensor) -> Tensor:
    """[k, 1]: numbers of half precision, so that 127 of them are exact and the same step is found again."""
    return halved(points.abs().amax(dim=1, keepdim=True) / 127)


def _multiples(points: Tensor, steps: Tensor) -> Tensor:
    return (points / steps).nan_to_num(0.0).round().clamp(-127, 127)


def left_out_similarity(embeddings: Tensor) -> Tensor | None:
    """[n]: cosine of each embedding [n, D] of a class to the mean of the others; None of one alone."""
    if len(embeddings) < 2:
        return None
    return F.cosine_similarity(embeddings, embeddings.sum(dim=0) - embeddings, dim=1)


@dataclass(frozen=True)
class Prototypes:
    """Value prototypes of earlier classes, with the scale m of their noise: mu_hat = mu + m * eps, eps ~ N(0,
    I).

    means: [A, D]. scales: [A, D], or [A, 1] for one scalar per prototype. labels: [A], classes as numbers.
    """

    means: Tensor
    scales: Tensor
    labels: Tensor

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` perturbed, L2-normalised prototypes, drawn with replacement, and their labels."""
        rows = torch.randint(len(self.means), (count,)).to(self.means.device)
        noise = torch.randn(count, self.means.shape[1]).to(self.means.device)
        return F.normalize(self.means[rows] + self.scales[rows] * noise, dim=1), self.labels[rows]

    def to(self, device: torch.device) -> Prototypes:
        return Prototypes(self.means.to(device), self.scales.to(device), self.labels.to(device))
