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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.method.prototypes import Sketch
from protosteer.method.stack import Bulk

RIDGE = 0.03  # lambda
RIDGE_SHARE = 0.3  # the weight of its logarithm, as a share of a whitened cosine's
RIDGE_FLOOR = 0.05  # a regression on zeros and ones says nothing of what is less likely
RIDGE_LIMIT = 4096  # points; the solve costs their number cubed, two seconds or so for these
LANDMARKS, LANDMARKS_PER_CLASS = 2048, 10  # for more points, as long as there are so many of them per class
LEFT_OUT_LEAST, LEFT_OUT_MOST = 200, 2_000  # images to find weights from; between the two, ...
LEFT_OUT_LIMIT = 4_000_000  # ... so many that images times classes are below
COVARIANCE = 262_144  # points that the covariance within classes is taken from; more add nothing but time
# Points or classes in double precision at once: so few that their memory is used again instead of being asked for
# anew, which had taken most of the time.
_BLOCK = 2_048


@dataclass(frozen=True)
class Space:
    """The sketches of C classes in one space as matrices, in double precision but for the points.

    A class may have several, of different tasks.
    """

    bulk: Bulk  # the points [P, D] among it
    counts: Tensor  # [P]: images behind each
    owners: Tensor  # [P]: classes as numbers
    parts: Tensor  # [P]: sketches as numbers
    left_out: Tensor  # [m]: rows of images as they are, of classes that have others; some, or those asked for
    sizes: Tensor  # [C]: images of each class
    means: Tensor  # [C, D]
    scatter: Tensor  # [D, D]: of images about their class means, ...
    freedom: float  # ... and of how many, less one per class

    @classmethod
    def of(
        cls,
        sketches: Sequence[Sketch] | Bulk,
        labels: Tensor | None = None,
        left_out: Tensor | None = None,
    ) -> Space:
        """labels: [R], the class of each sketch as a number; without, each is of a class of its own."""
        bulk = sketches if isinstance(sketches, Bulk) else Bulk.of(sketches)
        labels = torch.arange(len(bulk.lengths)) if labels is None else labels
        counts, parts = bulk.counts.double(), bulk.owners
        owners, classes, dim = labels[parts], int(labels.max()) + 1, bulk.deviations.shape[1]
        sizes = torch.zeros(classes, dtype=torch.double).index_add_(0, owners, counts)
        means = torch.zeros(classes, dim, dtype=torch.double)
        for some in blocks(len(owners)):
            means.index_add_(0, owners[some], bulk.decoded(some) * counts[some, None])
        means /= sizes[:, None]
        spread = _spread_classes(classes, len(owners))
        images = torch.zeros(len(labels), dtype=torch.double).index_add_(0, parts, counts)  # of each sketch
        squares = torch.zeros(dim, dtype=torch.double)
        for some in blocks(len(labels)):
            squares += (images * spread[labels])[some] @ bulk.deviations[some].double().square()
        scatter = torch.diag(squares)
        for rows in spread[owners].nonzero()[:, 0].split(_BLOCK):
            apart = (bulk.decoded(rows) - means[owners[rows]]) * counts[rows, None].sqrt()
            scatter += apart.T @ apart
        freedom = float(((sizes - 1) * spread).sum())
        place = torch.arange(len(owners)) - (bulk.lengths.cumsum(0) - bulk.lengths)[parts]
        single = (place < bulk.singles[parts]) & (sizes[owners] > 1)
        left_out = _some(single.nonzero()[:, 0], classes) if left_out is None else left_out
        return cls(bulk, counts, owners, parts, left_out, sizes, means, scatter, freedom)

    @property
    def points(self) -> Tensor:
        """float32 [P, D]"""
        return self.bulk.decoded()

    @property
    def classes(self) -> slice:
        """All of them."""
        return slice(0, len(self.means))


def blocks(count: int) -> Iterator[slice]:
    """Of rows that are worked on at once."""
    return (slice(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK))


def _spread_classes(classes: int, points: int) -> Tensor:
    """bool [C]: the classes whose points make the covariance: all, or evenly spread ones that have enough."""
    chosen = torch.arange(0, classes, max(1.0, points / COVARIANCE), dtype=torch.double).long()
    return torch.zeros(classes, dtype=torch.bool).index_fill_(0, chosen, True)


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


def places(owners: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Which of the images whose classes are `owners` [m] are of these classes, and where among them theirs is."""
    inside = (owners >= classes.start) & (owners < classes.stop)
    return inside.nonzero()[:, 0], owners[inside] - classes.start


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


class Coarse:
    """Both together, and how similar an embedding is to the classes.

    Similarity, the mean of the cosines to a class mean with and without whitening, is what tells images like no
    class: whitening sees small differences, without it an image must lie where images lie at all.
    """

    def __init__(
        self,
        sketches: Sequence[Sketch] | Bulk,
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


def _some(rows: Tensor, classes: int) -> Tensor:
    """Rows [m] as they are, or as many as time and memory allow, spread evenly."""
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), most_left_out(classes))).round().long()]


def most_left_out(classes: int) -> int:
    """Images that are left out at once."""
    return max(LEFT_OUT_LEAST, min(LEFT_OUT_MOST, LEFT_OUT_LIMIT // classes))


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


def arc_cosine(a: Tensor, b: Tensor) -> Tensor:
    """[A, B] of unit vectors: (sin t + (pi - t) cos t) / pi, t the angle between them."""
    cosine = (a @ b.T).clamp(-1, 1)
    angle = cosine.acos()
    return (angle.sin() + (math.pi - angle) * cosine) / math.pi


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
