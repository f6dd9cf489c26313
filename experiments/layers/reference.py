"""Reference implementation of a classifier on several layers of a frozen ViT: nothing is trained, one forward pass.

All scores are closed forms over the class summaries, in double precision. A model is the set of its class summaries:
merging, forgetting and growing add or drop summaries, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CLASS_TOKEN_OFFSETS = (0, 1, 2, 4)  # layers before the last one, of 12, whose class tokens are feature spaces
PATCH_MEAN_OFFSETS = (2, 5)  # the same for patch means
MAX_SINGLES = 20  # a class with at most so many images keeps each of them
SINGLES, CLUSTERS = (
    6,
    28,
)  # a larger class keeps so many single images, and so many cluster means of the others
RIDGE_LAMBDA = 0.05  # lambda of the kernel ridge, divided by the images behind a prototype
RIDGE_FLOOR = 0.02  # the ridge regresses zeros and ones: a score below this carries no information
MAX_EXACT_PROTOTYPES = 4096  # prototypes up to which the ridge is solved exactly
LANDMARKS = 2048  # prototypes that span the ridge's solution beyond that
PRIOR_LAST, PRIOR_OTHERS, PRIOR_PATCHES, PRIOR_RIDGE = (
    0.4,
    0.6,
    0.2,
    0.3,
)  # before normalisation, see `prior_shares`
PRIOR_IMAGES = 20.0  # leave-one-out images that the prior shares are worth
DEFAULT_SCALE = 12.0  # scale of the logits if no image can be left out
STEPS = {4: 0.3352, 8: 0.0308}  # best steps of 16 and 256 even levels for a normal distribution


# Feature spaces


def feature_layers(depth: int) -> tuple[list[int], list[int]]:
    """Return the layers (1 to `depth`) of the class-token and of the patch-mean feature spaces, last layer first."""
    chosen = []
    for offsets in (CLASS_TOKEN_OFFSETS, PATCH_MEAN_OFFSETS):
        layers = [max(1, depth - round(offset * depth / 12)) for offset in offsets]
        chosen.append(sorted(set(layers), reverse=True))
    return chosen[0], chosen[1]


def unit_features(tokens: Tensor) -> Tensor:
    """Apply a plain layer norm and scale tokens [..., D] to length 1; the scale of the norm cancels."""
    tokens = tokens.double()
    return F.normalize(tokens - tokens.mean(dim=-1, keepdim=True), dim=-1)


# Class summaries


@dataclass(frozen=True)
class ClassSummary:
    """One class in S feature spaces of width D: single images in 8 bits, then cluster means in 4 bits.

    Prototypes are the same images or clusters in every space. Leave-one-out scores use the single images, so their
    codes must not depend on their class: rounding errors that all images of a class share would reveal the class.
    """

    singles: Tensor  # uint8 [a, S, D]
    single_scales: Tensor  # half [a, S]
    centre: Tensor  # uint8 [1, S, D]: the mean of the clustered images; [0, S, D] without clusters
    centre_scales: Tensor  # half [1, S]
    clusters: Tensor  # uint8 [b, S, ceil(D / 2)]: cluster means from the centre, two 4-bit numbers each
    cluster_scales: Tensor  # half [b, S]
    cluster_counts: Tensor  # int64 [b]: images behind each cluster mean

    @property
    def prototypes(self) -> Tensor:
        """Decode the prototypes, double [a + b, S, D], single images first."""
        singles = decode(self.singles, self.single_scales, 8)
        if not len(self.clusters):
            return singles
        nibbles = torch.stack([self.clusters // 16, self.clusters % 16], dim=-1).flatten(2)
        offsets = decode(nibbles[..., : singles.shape[2]], self.cluster_scales, 4)
        return torch.cat([singles, decode(self.centre, self.centre_scales, 8) + offsets])

    @property
    def counts(self) -> Tensor:
        """Return the images behind each prototype, int64 [a + b]."""
        return torch.cat([torch.ones(len(self.singles), dtype=torch.int64), self.cluster_counts])

    @property
    def byte_count(self) -> int:
        """Count bytes in a file, with two for each count."""
        codes = (self.singles, self.centre, self.clusters)
        halves = (self.single_scales, self.centre_scales, self.cluster_scales, self.cluster_counts)
        return sum(x.numel() for x in codes) + 2 * sum(x.numel() for x in halves)


def summarise_class(features: Tensor, seed: int = 0) -> ClassSummary:
    """Summarise the unit features [n, S, D] of one class's images.

    Up to `MAX_SINGLES` images are kept as they are. Of more, `SINGLES` random images are kept, and the others are
    replaced by the means of at most `CLUSTERS` k-means clusters over all spaces together.
    """
    features = features.double()
    count, spaces, dim = features.shape
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    single = torch.arange(count) if count <= MAX_SINGLES else order[:SINGLES].sort().values
    rest = order[:0] if count <= MAX_SINGLES else order[SINGLES:].sort().values
    means, counts = k_means(features[rest].flatten(1), CLUSTERS, seed)
    centre = encode(features[rest].mean(dim=0, keepdim=True)[: len(means)], 8)
    offsets = means.view(-1, spaces, dim) - decode(*centre, 8)
    numbers, scales = encode(offsets, 4)
    nibbles = F.pad(numbers, (0, dim % 2))
    packed = nibbles[..., 0::2] * 16 + nibbles[..., 1::2]
    return ClassSummary(*encode(features[single], 8), *centre, packed, scales, counts)


def encode(vectors: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Code vectors [k, S, D] as numbers of 4 or 8 bits, uint8 [k, S, D], and scales, half [k, S].

    A cosine transform first spreads outlying dimensions over all, so that even levels fit any backbone. The scale
    is the least-squares one.
    """
    turned = vectors @ cosine_transform(vectors.shape[2]).T
    steps = STEPS[bits] * turned.square().mean(dim=2, keepdim=True).sqrt().clamp(min=1e-12)
    half = 2 ** (bits - 1)
    numbers = (turned / steps).floor().clamp(-half, half - 1)
    levels = numbers + 0.5
    scales = (turned * levels).sum(dim=2) / levels.square().sum(dim=2)
    return (numbers + half).to(torch.uint8), scales.half()


def decode(numbers: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Decode what `encode` gave, double [k, S, D]."""
    levels = (numbers.double() + 0.5 - 2 ** (bits - 1)) * scales.double()[..., None]
    return levels @ cosine_transform(numbers.shape[2])


def cosine_transform(dim: int) -> Tensor:
    """Return the orthonormal type-II cosine transform, double [dim, dim]."""
    places = torch.arange(dim, dtype=torch.double)
    matrix = torch.cos(math.pi / dim * places[:, None] * (places[None] + 0.5)) * math.sqrt(2 / dim)
    matrix[0] /= math.sqrt(2)
    return matrix


def k_means(vectors: Tensor, count: int, seed: int = 0, steps: int = 15) -> tuple[Tensor, Tensor]:
    """Cluster vectors [n, D]; return means [c, D] and sizes int64 [c] of the clusters that are not empty."""
    generator = torch.Generator().manual_seed(seed)
    means = vectors[torch.randperm(len(vectors), generator=generator)[:count]]
    sizes = torch.zeros(0, dtype=torch.int64)
    for _ in range(steps if len(vectors) else 0):
        nearest = (2 * vectors @ means.T - means.square().sum(dim=1)).argmax(dim=1)
        sizes = torch.bincount(nearest, minlength=len(means))
        sums = torch.zeros_like(means).index_add_(0, nearest, vectors)
        means, sizes = sums[sizes > 0] / sizes[sizes > 0, None], sizes[sizes > 0]
    return means, sizes


# Scores


@dataclass(frozen=True)
class PrototypeTable:
    """The prototypes of C classes as matrices."""

    features: Tensor  # [P, S, D]
    counts: Tensor  # [P]
    owners: Tensor  # [P]: class numbers
    sizes: Tensor  # [C]: images of each class
    loo_rows: Tensor  # [m]: single images of classes that have others

    @classmethod
    def from_summaries(cls, summaries: Sequence[ClassSummary], labels: Sequence[int] | None = None) -> PrototypeTable:
        """Join summaries; `labels` names the class of each, so that a class may have several."""
        numbers = torch.tensor(range(len(summaries)) if labels is None else labels)
        lengths = torch.tensor([len(summary.counts) for summary in summaries])
        counts = torch.cat([summary.counts for summary in summaries]).double()
        owners = numbers.repeat_interleave(lengths)
        sizes = torch.zeros(int(numbers.max()) + 1, dtype=torch.double).index_add_(0, owners, counts)
        single = torch.cat([torch.arange(len(s.counts)) < len(s.singles) for s in summaries])
        rows = (single & (sizes[owners] > 1)).nonzero()[:, 0]
        return cls(torch.cat([s.prototypes for s in summaries]), counts, owners, sizes, rows)

    def class_means(self) -> Tensor:
        """Average the prototypes of each class by their counts, [C, S, D]."""
        sums = torch.zeros(len(self.sizes), *self.features.shape[1:], dtype=torch.double)
        return sums.index_add_(0, self.owners, self.features * self.counts[:, None, None]) / self.sizes[:, None, None]


class WhitenedCosine:
    """Cosine to the class means, seen from their centre and whitened by the covariance within classes.

    The covariance is that of prototypes about their class means. The spread inside clusters is ignored on purpose:
    the README beside this file has the measurement.
    """

    def __init__(self, table: PrototypeTable, space: int):
        self.prototypes, self.owners, self.counts = table.features[:, space], table.owners, table.counts
        self.sizes, self.rows = table.sizes, table.loo_rows
        self.means = table.class_means()[:, space]
        self.centre = self.means.mean(dim=0) if len(self.means) > 1 else torch.zeros_like(self.means[0])
        residuals = (self.prototypes - self.means[self.owners]) * self.counts[:, None].sqrt()
        dof, identity = float((self.sizes - 1).sum()), torch.eye(self.means.shape[1], dtype=torch.double)
        covariance = residuals.T @ residuals / max(dof, 1.0)
        scale = float(covariance.trace()) / len(covariance)
        self.shrinkage = oas_shrinkage(covariance, dof)
        flat = scale <= 1e-12  # one image per class, or copies: there is no covariance
        shrunk = identity if flat else (1 - self.shrinkage) * covariance + self.shrinkage * scale * identity
        self.precision = torch.cholesky_inverse(torch.linalg.cholesky(shrunk))
        self.image_share = 0.0 if flat else (1 - self.shrinkage) / max(dof, 1.0)

    def scores(self, features: Tensor) -> Tensor:
        """Score unit features [B, D] of this space, [B, C]."""
        query, means = features - self.centre, self.means - self.centre
        whitened = query @ self.precision
        lengths = _dot(whitened, query)[:, None] * _dot(means @ self.precision, means)
        return whitened @ means.T / lengths.clamp(min=1e-24).sqrt()

    def loo_scores(self) -> Tensor:
        """Score each single image as if it had not been learned, [m, C].

        Without image x of a class of n images with residual r = x - mean, the class mean is mean - r / (n - 1) and
        the scatter loses n / (n - 1) r r'. The precision follows by Sherman and Morrison. Shrinkage, its scale,
        degrees of freedom and centre stay.
        """
        images, owners = self.prototypes[self.rows], self.owners[self.rows]
        sizes, numbers = self.sizes[owners], torch.arange(len(self.rows))
        query, residuals, means = images - self.centre, images - self.means[owners], self.means - self.centre
        turned, whitened = residuals @ self.precision, query @ self.precision
        share = self.image_share * sizes / (sizes - 1)
        gain = share / (1 - share * _dot(turned, residuals)).clamp(min=1e-9)
        reduced = means[owners] - residuals / (sizes - 1)[:, None]
        across, aside = whitened @ means.T, turned @ means.T
        lengths = _dot(means @ self.precision, means).repeat(len(images), 1)
        across[numbers, owners], aside[numbers, owners] = _dot(whitened, reduced), _dot(turned, reduced)
        lengths[numbers, owners] = _dot(reduced @ self.precision, reduced)
        own = _dot(turned, query)
        across += (gain * own)[:, None] * aside
        lengths += gain[:, None] * aside.square()
        squares = (_dot(whitened, query) + gain * own.square())[:, None] * lengths
        return across / squares.clamp(min=1e-24).sqrt()


class KernelRidge:
    """Ridge regression of class membership on all spaces together, with the arc-cosine kernel (Cho and Saul 2009).

    The feature vector is the concatenation of the S centred unit vectors, scaled to length 1. The cosine of two such
    vectors is the mean of the S cosines. A prototype of n images has the ridge `RIDGE_LAMBDA` / n.
    """

    def __init__(self, table: PrototypeTable):
        means = table.class_means()
        self.centre = means.mean(dim=0) if len(means) > 1 else torch.zeros_like(means[0])
        self.prototypes = self.joint_features(table.features)
        self.targets = F.one_hot(table.owners, len(table.sizes)).double()
        self.counts, self.rows = table.counts, table.loo_rows
        solve = self._solve_exactly if len(self.targets) <= MAX_EXACT_PROTOTYPES else self._solve_with_landmarks
        self.weights, self._loo = solve()

    def joint_features(self, features: Tensor) -> Tensor:
        """Centre each space of features [B, S, D], scale to unit length and concatenate, [B, S * D]."""
        unit = F.normalize(features - self.centre, dim=2)
        return unit.flatten(1) / math.sqrt(features.shape[1])

    def scores(self, features: Tensor) -> Tensor:
        """Score features [B, S, D], [B, C]."""
        return arc_cosine(self.joint_features(features), self.prototypes) @ self.weights

    def loo_scores(self) -> Tensor:
        """Score each single image by the ridge over all others, [m, C]; the centre stays."""
        return self._loo

    def _solve_exactly(self) -> tuple[Tensor, Tensor]:
        """Solve (K + RIDGE_LAMBDA / n) W = Y; the leave-one-out score of image i is y_i - W_i / inverse_ii."""
        kernel = arc_cosine(self.prototypes, self.prototypes)
        kernel.diagonal().add_(RIDGE_LAMBDA / self.counts)
        factor = torch.linalg.cholesky(kernel)
        weights = torch.cholesky_solve(self.targets, factor)
        columns = F.one_hot(self.rows, len(kernel)).double().T
        diagonal = torch.linalg.solve_triangular(factor, columns, upper=False).square().sum(dim=0)
        return weights, self.targets[self.rows] - weights[self.rows] / diagonal[:, None]

    def _solve_with_landmarks(self) -> tuple[Tensor, Tensor]:
        """Solve in the span of `LANDMARKS` prototypes (Nystrom); an image left out may stay a landmark."""
        chosen = torch.linspace(0, len(self.targets) - 1, LANDMARKS).round().long()
        landmarks, counts = self.prototypes[chosen], self.counts[:, None]
        kernel = arc_cosine(landmarks, landmarks)
        kernel.diagonal().add_(1e-6)
        root = torch.linalg.cholesky(kernel)
        mapped = torch.linalg.solve_triangular(root, arc_cosine(landmarks, self.prototypes), upper=False).T
        moments = mapped.T @ (counts * mapped)
        moments.diagonal().add_(RIDGE_LAMBDA)
        factor = torch.linalg.cholesky(moments)
        solved = torch.cholesky_solve(mapped.T @ (counts * self.targets), factor)
        left = mapped[self.rows]
        leverage = torch.linalg.solve_triangular(factor, left.T, upper=False).square().sum(dim=0)[:, None]
        loo = (left @ solved - leverage * self.targets[self.rows]) / (1 - leverage).clamp(min=1e-9)
        self.prototypes = landmarks
        return torch.linalg.solve_triangular(root.T, solved, upper=True), loo


def arc_cosine(first: Tensor, second: Tensor) -> Tensor:
    """Return the arc-cosine kernel of unit vectors, [A, B]: (sin t + (pi - t) cos t) / pi, t their angle."""
    cosine = (first @ second.T).clamp(-1, 1)
    angle = cosine.acos()
    return (angle.sin() + (math.pi - angle) * cosine) / math.pi


def oas_shrinkage(covariance: Tensor, dof: float) -> float:
    """Return the share of a scaled identity by oracle approximating shrinkage (Chen et al. 2010)."""
    trace, squares = float(covariance.trace()), float(covariance.square().sum())
    excess = squares - trace**2 / len(covariance)
    return 1.0 if dof < 1 or excess <= 0 else min(1.0, (squares + trace**2) / ((dof + 1) * excess))


# Weights


def prior_shares(class_tokens: int, patch_means: int) -> Tensor:
    """Return the prior shares of the whitened cosines and the ridge, double [class_tokens + patch_means + 1], sum 1."""
    last, others = (PRIOR_LAST, PRIOR_OTHERS) if class_tokens > 1 else (1.0, 0.0)
    weights = [last] + [others / max(1, class_tokens - 1)] * (class_tokens - 1)
    weights += [PRIOR_PATCHES / max(1, patch_means)] * patch_means + [PRIOR_RIDGE]
    return torch.tensor(weights, dtype=torch.double) / sum(weights)


def fit_shares(scores: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """Fit the share of each score, [k], to leave-one-out scores [m, C, k] of images of classes `labels` [m].

    The shares minimise the sum over images of 2 (1 - sqrt p), the squared Hellinger distance between probabilities
    and label, minus `PRIOR_IMAGES` sum_k prior_k log share_k. The distance is bounded, so a few outliers cannot
    dominate the fit as they do in the likelihood.
    """
    if not len(labels):
        return prior
    logs = (DEFAULT_SCALE * prior).log().requires_grad_()
    numbers = torch.arange(len(labels))

    def loss() -> Tensor:
        logits = scores @ logs.exp()
        chosen = logits[numbers, labels] - logits.logsumexp(dim=1)
        distance = 2 * (1 - (chosen / 2).exp()).sum()
        return (distance - PRIOR_IMAGES * prior @ logs.log_softmax(dim=0)) / len(labels)

    _minimise(logs, loss)
    return logs.detach().softmax(dim=0)


def fit_scale(logits: Tensor, labels: Tensor) -> float:
    """Fit the factor that makes the softmax of leave-one-out logits [m, C] calibrated, by maximum likelihood.

    Labels are smoothed by 1 / (m + 1), which bounds how confident the classifier can be.
    """
    if not len(labels):
        return DEFAULT_SCALE
    smoothing = 1 / (len(labels) + 1)
    target = (1 - smoothing) * logits[torch.arange(len(labels)), labels] + smoothing * logits.mean(dim=1)
    log_scale = torch.full((1,), math.log(DEFAULT_SCALE), dtype=torch.double, requires_grad=True)

    def loss() -> Tensor:
        return ((logits * log_scale.exp()).logsumexp(dim=1) - target * log_scale.exp()).mean()

    _minimise(log_scale, loss)
    return float(log_scale.detach().exp())


def _minimise(parameter: Tensor, loss: Callable[[], Tensor]) -> None:
    """Minimise a loss over one parameter, in place, by L-BFGS."""
    optimiser = torch.optim.LBFGS([parameter], max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    optimiser.step(closure)


# The classifier


class LayerClassifier:
    """Classifier over all class summaries of a model."""

    def __init__(self, summaries: Sequence[ClassSummary], class_tokens: int, labels: Sequence[int] | None = None):
        """Fit shares and scale.

        Args:
            summaries: Of all classes; each has the same S spaces.
            class_tokens: How many spaces, the first ones, are like the backbone's output; the others get smaller priors.
            labels: Class number of each summary, if a class has several.
        """
        self.table = PrototypeTable.from_summaries(summaries, labels)
        spaces = self.table.features.shape[1]
        self.whitened = [WhitenedCosine(self.table, space) for space in range(spaces)]
        self.ridge = KernelRidge(self.table)
        self.loo_labels = self.table.owners[self.table.loo_rows]
        self.loo_parts = self._join([w.loo_scores() for w in self.whitened], self.ridge.loo_scores())
        self.shares = fit_shares(self.loo_parts, self.loo_labels, prior_shares(class_tokens, spaces - class_tokens))
        self.scale = fit_scale(self.loo_parts @ self.shares, self.loo_labels)

    def logits(self, features: Tensor) -> Tensor:
        """Score unit features [B, S, D]; the softmax of the result [B, C] is calibrated."""
        features = features.double()
        whitened = [w.scores(features[:, space]) for space, w in enumerate(self.whitened)]
        return self.scale * self._join(whitened, self.ridge.scores(features)) @ self.shares

    def loo_logits(self) -> Tensor:
        """Return the logits of the single images, each as if it had not been learned, [m, C]."""
        return self.scale * self.loo_parts @ self.shares

    @staticmethod
    def _join(whitened: list[Tensor], ridge: Tensor) -> Tensor:
        return torch.stack([*whitened, ridge.clamp(min=RIDGE_FLOOR).log()], dim=2)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(dim=1)
