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
from collections.abc import Sequence
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
UNCALIBRATED = 10.0  # the weight where no image can be left out
LEFT_OUT_LEAST, LEFT_OUT_MOST = 200, 2_000  # images to find weights from; between the two, ...
LEFT_OUT_LIMIT = 4_000_000  # ... so many that images times classes are below
WEIGHED, NEAR = 20_000, 256  # classes that weights are found from, and how many of them are the likeliest
COVARIANCE = 262_144  # points that the covariance within classes is taken from; more add nothing but time
_BLOCK = 65_536  # points in double precision at once, so that a hundred thousand classes fit into memory


@dataclass(frozen=True)
class Space:
    """The sketches of C classes in one space as matrices, in double precision but for the points."""

    points: Tensor  # [P, D]
    counts: Tensor  # [P]: images behind each
    owners: Tensor  # [P]: classes as numbers
    left_out: Tensor  # [m]: rows of images as they are, of classes that have others; some, or those asked for
    sizes: Tensor  # [C]: images of each class
    means: Tensor  # [C, D]
    scatter: Tensor  # [D, D]: of images about their class means, ...
    freedom: float  # ... and of how many, less one per class

    @classmethod
    def of(cls, sketches: Sequence[Sketch] | Bulk, left_out: Tensor | None = None) -> Space:
        bulk = sketches if isinstance(sketches, Bulk) else Bulk.of(sketches)
        points, counts, owners = bulk.points, bulk.counts.double(), bulk.owners
        classes = len(bulk.lengths)
        sizes = torch.zeros(classes, dtype=torch.double).index_add_(0, owners, counts)
        means = torch.zeros(classes, points.shape[1], dtype=torch.double)
        for some in torch.arange(len(points)).split(_BLOCK):
            means.index_add_(0, owners[some], points[some] * counts[some, None])
        means /= sizes[:, None]
        spread = _spread_classes(bulk.lengths)
        scatter = torch.diag((sizes * spread) @ bulk.deviations.double().square())
        for some in spread[owners].nonzero()[:, 0].split(_BLOCK):
            apart = (points[some] - means[owners[some]]) * counts[some, None].sqrt()
            scatter += apart.T @ apart
        freedom = float(((sizes - 1) * spread).sum())
        place = torch.arange(len(points)) - (bulk.lengths.cumsum(0) - bulk.lengths)[owners]
        single = (place < bulk.singles[owners]) & (sizes[owners] > 1)
        left_out = _some(single.nonzero()[:, 0], classes) if left_out is None else left_out
        return cls(points, counts, owners, left_out, sizes, means, scatter, freedom)


def _spread_classes(lengths: Tensor) -> Tensor:
    """bool [C]: the classes whose points make the covariance: all, or evenly spread ones that have enough."""
    share = max(1.0, float(lengths.sum()) / COVARIANCE)
    chosen = torch.arange(0, len(lengths), share, dtype=torch.double).long()
    return torch.zeros(len(lengths), dtype=torch.bool).index_fill_(0, chosen, True)


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
        self.directions = (space.means - self.centre) @ self.precision  # [C, D]
        self.lengths = _dot(self.directions, space.means - self.centre)  # [C], squared

    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> Tensor:
        """[B, C] of unit vectors [B, D]; of some classes alone: [n], or [B, n], different ones for each."""
        centred = embeddings - self.centre
        own = _dot(centred @ self.precision, centred)[:, None]
        lengths = self.lengths if classes is None else self.lengths[classes]
        return _cosine(_across(centred, self.directions, classes), own, lengths)

    def units(self, vectors: Tensor) -> Tensor:
        """float32 [N, D]: directions whose dot products are whitened cosines, of vectors [N, D]."""
        root = torch.linalg.cholesky(self.precision)
        parts = [F.normalize((some - self.centre) @ root, dim=1).float() for some in vectors.split(_BLOCK)]
        return torch.cat(parts)

    def left_out(self) -> Tensor:
        """[m, C]: scores of the images that are left out, each as if it had not been learned.

        Its class mean is that of the others, and the precision is updated for one residual less (Sherman and
        Morrison); shrinkage and centre stay.
        """
        space, rows = self.space, self.space.left_out
        owners, index = space.owners[rows], torch.arange(len(rows))
        sizes = space.sizes[owners]
        points = space.points[rows].double()
        centred, residual = points - self.centre, points - space.means[owners]
        seen = residual @ self.precision
        weight = self.share * sizes / (sizes - 1)
        gain = weight / (1 - weight * _dot(seen, residual)).clamp(min=1e-9)
        mine = _dot(seen, centred)  # residual and embedding
        theirs = residual @ self.directions.T  # residual and class means
        across = centred @ self.directions.T
        lengths = self.lengths.repeat(len(rows), 1)
        without = space.means[owners] - residual / (sizes - 1)[:, None] - self.centre
        theirs[index, owners] = _dot(seen, without)
        across[index, owners] = _dot(centred @ self.precision, without)
        lengths[index, owners] = _dot(without @ self.precision, without)
        own = _dot(centred @ self.precision, centred) + gain * mine**2
        return _cosine(
            across + gain[:, None] * mine[:, None] * theirs, own[:, None], lengths + gain[:, None] * theirs**2
        )


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
        if len(space.points) <= RIDGE_LIMIT:
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

    def __init__(self, sketches: Sequence[Sketch] | Bulk, left_out: Tensor | None = None):
        self.space = Space.of(sketches, left_out)
        self.whitened = Whitened(self.space)
        self.ridge = Ridge.of(self.space)
        self.directions = F.normalize(self.space.means, dim=1)

    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Evidence [B, C] of embeddings [B, D], and similarity [B, C] as a cosine.

        classes: some of them alone, [n], or [B, n], different ones for each.
        """
        unit = F.normalize(embeddings.double(), dim=1)
        whitened = self.whitened.scores(unit, classes)
        plain = _across(unit, self.directions, classes)
        ridge = self.ridge.scores(unit) if self.ridge else None
        if ridge is not None and classes is not None:
            ridge = ridge[:, classes] if classes.ndim == 1 else ridge.gather(1, classes)
        return _joined(whitened, ridge, plain)

    def left_out(self) -> tuple[Tensor, Tensor]:
        """The same of the images that are left out [m], each as if it had not been learned."""
        space, rows = self.space, self.space.left_out
        owners = space.owners[rows]
        points, sizes = space.points[rows].double(), space.sizes[owners][:, None]
        plain = points @ self.directions.T
        others = sizes * space.means[owners] - points
        plain[torch.arange(len(rows)), owners] = F.cosine_similarity(points, others, dim=1)
        ridge = self.ridge.left_out() if self.ridge else None
        return _joined(self.whitened.left_out(), ridge, plain)


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


def weights(evidence: Sequence[Tensor], labels: Tensor) -> Tensor:
    """One weight per kind of evidence [m, C]: those under which the true classes [m] are likeliest.

    Never negative. That nothing among m images went wrong does not mean that nothing ever will: the m + 1st
    counts as one that says nothing, which bounds how sure a model can be.
    """
    stacked = torch.stack(list(evidence), dim=-1)
    if not len(labels):
        return torch.full((len(evidence),), UNCALIBRATED / len(evidence), dtype=torch.double)
    logs = torch.full((len(evidence),), math.log(UNCALIBRATED / len(evidence)), dtype=torch.double)
    logs.requires_grad_()
    optimiser = torch.optim.LBFGS([logs], max_iter=50, line_search_fn="strong_wolfe")
    smoothing = 1 / (len(labels) + 1)
    own, usual = stacked[torch.arange(len(labels)), labels], stacked.mean(dim=1)  # [m, kinds]
    few = _thinned(stacked) if stacked.shape[1] > WEIGHED else None

    def entropy() -> Tensor:
        if few is None:
            return F.cross_entropy(stacked @ logs.exp(), labels, label_smoothing=smoothing)
        total = (few[0] @ logs.exp() + few[1]).logsumexp(dim=1)
        return (total - ((1 - smoothing) * own + smoothing * usual) @ logs.exp()).mean()

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = entropy()
        value.backward()
        return value

    optimiser.step(loss)
    return logs.detach().exp()


def _thinned(stacked: Tensor) -> tuple[Tensor, Tensor]:
    """Columns that stand for all classes in a sum: the NEAR that say most, and others, evenly spread.

    Of evidence [m, C, kinds]: that of k columns [m, k, kinds], and for how many classes each stands [m, k], as a
    logarithm.
    """
    count, classes, kinds = stacked.shape
    near = stacked.sum(dim=2).topk(NEAR, dim=1).indices
    spread = torch.linspace(0, classes - 1, WEIGHED - NEAR).round().long()
    taken = torch.zeros(count, classes, dtype=torch.bool).scatter_(1, near, True)[:, spread]
    many = ((classes - NEAR) / (~taken).sum(dim=1, keepdim=True).double()).log().expand_as(taken)
    offsets = torch.cat([many.new_zeros(count, NEAR), many.masked_fill(taken, -torch.inf)], dim=1)
    found = stacked.gather(1, near[:, :, None].expand(-1, -1, kinds))
    return torch.cat([found, stacked[:, spread]], dim=1), offsets


def _inverse(positive: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(positive))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1)


def _across(vectors: Tensor, directions: Tensor, classes: Tensor | None) -> Tensor:
    """Dot products of vectors [B, D] and the directions of all classes [C, D], of some [n], or of its own [B, n]."""
    if classes is None or classes.ndim == 1:
        return vectors @ (directions if classes is None else directions[classes]).T
    return (directions[classes] @ vectors[:, :, None])[:, :, 0]


def _cosine(across: Tensor, own: Tensor, lengths: Tensor) -> Tensor:
    """Zero where one of the two has no length."""
    return across / (own * lengths).clamp(min=1e-24).sqrt()
