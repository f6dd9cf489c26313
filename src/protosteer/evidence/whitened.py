"""Whitened cosine: the cosine between an embedding and a class mean, whitened by the covariance within classes.

Both are centred on the mean of all class means. The covariance is shrunk by oracle approximating
shrinkage (Chen et al. 2010). Leave-one-out scores have a closed form.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.class_statistics import ClassStatistics, blocks, rows_in_class_range


class WhitenedCosine:
    """Whitened cosine to the class means."""

    def __init__(self, statistics: ClassStatistics):
        self.statistics = statistics
        dof = statistics.dof
        covariance = statistics.scatter / max(dof, 1.0)
        self.shrinkage = oas(covariance, dof)
        scale = covariance.trace() / len(covariance)
        shrunk = (1 - self.shrinkage) * covariance + self.shrinkage * scale * torch.eye(len(covariance))
        is_flat = float(scale) <= 1e-12  # one image per class, or copies of it: no covariance to whiten with
        self.precision = torch.eye(len(shrunk)).double() if is_flat else _inverse(shrunk)  # [D, D]
        # One image adds this share of its squared residual to the shrunk covariance.
        self.share = 0.0 if is_flat else (1 - self.shrinkage) / max(dof, 1.0)
        self.centre = statistics.centre
        self.squared_lengths = self._squared_lengths()  # [C]

    def _squared_lengths(self) -> Tensor:
        means = self.statistics.means
        centred = (means[block] - self.centre for block in blocks(len(means)))
        return torch.cat([_dot(block @ self.precision, block) for block in centred])

    @property
    def directions(self) -> Tensor:
        """[C, D]: their dot products with centred embeddings are those of whitened class means and embeddings."""
        return (self.statistics.means - self.centre) @ self.precision

    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> Tensor:
        """Score unit vectors [B, D] against all classes [B, C], or against `classes`, [n] or [B, n]."""
        centred = embeddings - self.centre
        whitened = centred @ self.precision
        across = dot_means(whitened, self.statistics.means, classes) - (whitened @ self.centre)[:, None]
        lengths = self.squared_lengths if classes is None else self.squared_lengths[classes]
        return _cosine(across, _dot(whitened, centred)[:, None], lengths)

    def units(self, vectors: Tensor) -> Tensor:
        """Return unit vectors, float32 [N, D], whose dot products are the whitened cosines of vectors [N, D]."""
        root = torch.linalg.cholesky(self.precision)
        units = torch.empty(vectors.shape)
        for block in blocks(len(vectors)):
            units[block] = F.normalize((vectors[block] - self.centre) @ root, dim=1)
        return units

    def loo_scores(self, classes: slice | None = None) -> Tensor:
        """Score the leave-one-out images, each as if it had not been learned, against a range of classes or all: [m, C].

        An image's class mean is that of its other images, and the precision is updated for one residual less (Sherman
        and Morrison). Shrinkage and centre stay the same.
        """
        statistics = self.statistics
        owners, classes, points = statistics.loo_labels, classes or statistics.all_classes, statistics.loo_points
        sizes, class_means = statistics.sizes[owners], statistics.means[owners]
        centred, residual = points - self.centre, points - class_means
        white_residual, white_point = residual @ self.precision, centred @ self.precision
        weight = self.share * sizes / (sizes - 1)
        gain = weight / (1 - weight * _dot(white_residual, residual)).clamp(min=1e-9)
        residual_point = _dot(white_residual, centred)
        means = statistics.means[classes] - self.centre
        residual_means, across = white_residual @ means.T, white_point @ means.T
        lengths = self.squared_lengths[classes].repeat(len(points), 1)
        loo_means = class_means - residual / (sizes - 1)[:, None] - self.centre
        cells = rows_in_class_range(owners, classes)
        residual_means[cells] = _dot(white_residual, loo_means)[cells[0]]
        across[cells] = _dot(white_point, loo_means)[cells[0]]
        lengths[cells] = _dot(loo_means @ self.precision, loo_means)[cells[0]]
        across += (gain * residual_point)[:, None] * residual_means
        lengths += gain[:, None] * residual_means.square_()
        return _cosine(across, (_dot(white_point, centred) + gain * residual_point**2)[:, None], lengths)


def oas(covariance: Tensor, dof: float) -> float:
    """Return the share of a scaled identity: oracle approximating shrinkage of a covariance [D, D]."""
    dim = len(covariance)
    trace, squares = float(covariance.trace()), float(covariance.square().sum())
    excess = squares - trace**2 / dim
    if dof < 1 or excess <= 0:
        return 1.0
    return min(1.0, (squares + trace**2) / ((dof + 1) * excess))


def dot_means(vectors: Tensor, means: Tensor, classes: Tensor | None) -> Tensor:
    """Multiply vectors [B, D] with the means [C, D] of all classes, or of `classes`, [n] or [B, n]."""
    if classes is None or classes.ndim == 1:
        return vectors @ (means if classes is None else means[classes]).T
    return (means[classes] @ vectors[:, :, None])[:, :, 0]


def _inverse(positive: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(positive))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1)


def _cosine(dots: Tensor, squares: Tensor, class_squares: Tensor) -> Tensor:
    """Divide dot products [B, n] by lengths, given as squares; zero where one of the two vectors is zero."""
    return dots / (squares * class_squares).clamp(min=1e-24).sqrt()
