"""Coarse evidence: how much an embedding speaks for each of all classes, read from a few points per class.

Everything here is a closed form over the points of all classes in one space, so that classes come and go
without training, and so that what the evidence would have been without an image that was learned is known
exactly. From that come the weights: probabilities that mean something need no image held out.

- Whitened cosine: between an embedding and a class mean, both seen from the mean of all class means and
  whitened by the covariance within classes, which is shrunk as far as its own noise says (Chen et al. 2010,
  oracle approximating shrinkage).
- Kernel ridge over the points with the arc-cosine kernel (Cho and Saul 2009), the limit of infinitely many
  random ReLU features. What it regresses is the probability of a class, so its logarithm is the evidence. It
  needs a solve over all points; where there are too many, over some of them, and in the end it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.class_statistics import Space, blocks, places
from protosteer.evidence.kernel_ridge import Ridge
from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.evidence.summary_table import SummaryTable

RIDGE_SHARE = 0.3  # the weight of its logarithm, as a share of a whitened cosine's
RIDGE_FLOOR = 0.05  # a regression on zeros and ones says nothing of what is less likely


class Whitened:
    """Whitened cosine to the class means."""

    def __init__(self, space: Space):
        self.space = space
        freedom = space.freedom
        covariance = space.scatter / max(freedom, 1.0)
        self.shrinkage = oas(covariance, freedom)
        scale = covariance.trace() / len(covariance)
        shrunk = (1 - self.shrinkage) * covariance + self.shrinkage * scale * torch.eye(len(covariance))
        flat = float(scale) <= 1e-12  # one image per class, or copies of one: there is nothing to whiten with
        self.precision = torch.eye(len(shrunk)).double() if flat else _inverse(shrunk)
        # What one image adds to the shrunk covariance is this much of the square of its residual.
        self.share = 0.0 if flat else (1 - self.shrinkage) / max(freedom, 1.0)
        # A class alone has nothing to be seen from but the origin.
        self.centre = space.means.mean(dim=0) if len(space.means) > 1 else torch.zeros_like(space.means[0])
        self.lengths = self._squared_lengths()  # [C]

    def _squared_lengths(self) -> Tensor:
        centred = (self.space.means[some] - self.centre for some in blocks(len(self.space.means)))
        return torch.cat([_dot(some @ self.precision, some) for some in centred])

    @property
    def directions(self) -> Tensor:
        """[C, D]: whose dot products with centred embeddings are those of whitened vectors."""
        return (self.space.means - self.centre) @ self.precision

    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> Tensor:
        """[B, C] of unit vectors [B, D]; of some classes alone: [n], or [B, n], different ones for each."""
        centred = embeddings - self.centre
        seen = centred @ self.precision
        across = _across(seen, self.space.means, classes) - (seen @ self.centre)[:, None]
        lengths = self.lengths if classes is None else self.lengths[classes]
        return _cosine(across, _dot(seen, centred)[:, None], lengths)

    def units(self, vectors: Tensor) -> Tensor:
        """float32 [N, D]: directions whose dot products are whitened cosines, of vectors [N, D]."""
        root = torch.linalg.cholesky(self.precision)
        units = torch.empty(vectors.shape)
        for some in blocks(len(vectors)):
            units[some] = F.normalize((vectors[some] - self.centre) @ root, dim=1)
        return units

    def left_out(self, classes: slice | None = None) -> Tensor:
        """[m, C]: scores of the images that are left out, each as if it had not been learned; or of some classes.

        Its class mean is that of the others, and the precision is updated for one residual less (Sherman and
        Morrison); shrinkage and centre stay.
        """
        space, rows, classes = self.space, self.space.left_out, classes or self.space.classes
        points, owners = space.bulk.decoded(rows).double(), space.owners[rows]
        sizes = space.sizes[owners]
        centred, residual = points - self.centre, points - space.means[owners]
        seen, query = residual @ self.precision, centred @ self.precision
        weight = self.share * sizes / (sizes - 1)
        gain = weight / (1 - weight * _dot(seen, residual)).clamp(min=1e-9)
        mine = _dot(seen, centred)  # residual and embedding
        means = space.means[classes] - self.centre
        theirs, across = seen @ means.T, query @ means.T  # residual, embedding, and class means
        lengths = self.lengths[classes].repeat(len(points), 1)
        without = space.means[owners] - residual / (sizes - 1)[:, None] - self.centre
        own = places(owners, classes)
        theirs[own] = _dot(seen, without)[own[0]]
        across[own] = _dot(query, without)[own[0]]
        lengths[own] = _dot(without @ self.precision, without)[own[0]]
        across += (gain * mine)[:, None] * theirs
        lengths += gain[:, None] * theirs.square_()
        return _cosine(across, (_dot(query, centred) + gain * mine**2)[:, None], lengths)


class Coarse:
    """Both together, and how similar an embedding is to the classes.

    Similarity, the mean of the cosines to a class mean with and without whitening, is what tells images like no
    class: whitening sees small differences, without it an image must lie where images lie at all.
    """

    def __init__(
        self,
        sketches: Sequence[ClassSummary] | SummaryTable,
        labels: Tensor | None = None,
        left_out: Tensor | None = None,
    ):
        """labels, left_out: see `Space`."""
        self.space = Space.of(sketches, labels, left_out)
        self.whitened = Whitened(self.space)
        self.ridge = Ridge.of(self.space)
        self.lengths = self.space.means.norm(dim=1).clamp(min=1e-12)  # [C]

    @property
    def directions(self) -> Tensor:
        """[C, D]: of the class means, as unit vectors."""
        return F.normalize(self.space.means, dim=1)

    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Evidence [B, C] of embeddings [B, D], and similarity [B, C] as a cosine.

        classes: some of them alone, [n], or [B, n], different ones for each.
        """
        unit = F.normalize(embeddings.double(), dim=1)
        whitened = self.whitened.scores(unit, classes)
        lengths = self.lengths if classes is None else self.lengths[classes]
        plain = _across(unit, self.space.means, classes) / lengths
        ridge = self.ridge.scores(unit) if self.ridge else None
        if ridge is not None and classes is not None:
            ridge = ridge[:, classes] if classes.ndim == 1 else ridge.gather(1, classes)
        return _joined(whitened, ridge, plain)

    def left_out(self, classes: slice | None = None) -> tuple[Tensor, Tensor]:
        """The same of the images that are left out [m], each as if it had not been learned; or of some classes."""
        space, rows, classes = self.space, self.space.left_out, classes or self.space.classes
        points, owners = space.bulk.decoded(rows).double(), space.owners[rows]
        plain = points @ space.means[classes].T / self.lengths[classes]
        own = places(owners, classes)
        others = space.sizes[owners][:, None] * space.means[owners] - points
        plain[own] = F.cosine_similarity(points, others, dim=1)[own[0]]
        ridge = self.ridge.left_out()[:, classes] if self.ridge else None
        return _joined(self.whitened.left_out(classes), ridge, plain)


def _joined(whitened: Tensor, ridge: Tensor | None, plain: Tensor) -> tuple[Tensor, Tensor]:
    evidence = whitened if ridge is None else whitened + RIDGE_SHARE * ridge.clamp(min=RIDGE_FLOOR).log()
    return evidence, (whitened + plain) / 2


def oas(covariance: Tensor, freedom: float) -> float:
    """Oracle approximating shrinkage: the share of a scaled identity, from the covariance's own spread."""
    dim = len(covariance)
    trace, squares = float(covariance.trace()), float(covariance.square().sum())
    excess = squares - trace**2 / dim
    if freedom < 1 or excess <= 0:
        return 1.0
    return min(1.0, (squares + trace**2) / ((freedom + 1) * excess))


def _inverse(positive: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(positive))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1)


def _across(vectors: Tensor, means: Tensor, classes: Tensor | None) -> Tensor:
    """Dot products of vectors [B, D] and the means of all classes [C, D], of some [n], or of its own [B, n]."""
    if classes is None or classes.ndim == 1:
        return vectors @ (means if classes is None else means[classes]).T
    return (means[classes] @ vectors[:, :, None])[:, :, 0]


def _cosine(across: Tensor, own: Tensor, lengths: Tensor) -> Tensor:
    """Zero where one of the two has no length."""
    return across / (own * lengths).clamp(min=1e-24).sqrt()
