"""Calibrate the weights of feature spaces and scores by leave-one-out: no image need be held out.

Never are the scores of all classes needed at once. Beyond `MAX_CLASSES` classes they are computed block by block. Of
each image the most probable classes stay, and evenly spaced others, which stand for all others in a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from protosteer.evidence.class_statistics import max_loo_images, rows_in_class_range
from protosteer.evidence.scorer import CoarseScorer
from protosteer.evidence.summary_table import SummaryTable

UNCALIBRATED_WEIGHT = 10.0  # where no image can be left out
MAX_CLASSES = 20_000  # that all count; of more, for each image, the most probable and evenly spaced others
NEAREST_CLASSES, SAMPLED_CLASSES = 256, 4_096
_BLOCK = 4_096  # classes scored at once
PRIOR_IMAGES = 20.0  # leave-one-out images that the prior shares of several feature spaces are worth


@dataclass(frozen=True)
class ImageWeights:
    """How much each of m leave-one-out images counts in calibration."""

    weights: Tensor  # double [m], at least 0

    @cached_property
    def mask(self) -> Tensor:
        """Tell, bool [m], which images count at all."""
        return self.weights > 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the weighted sum of values [n], one for each image that counts."""
        own = self.weights[self.mask]
        return values.sum() if bool((own == 1).all()) else own @ values

    def mean(self, values: Tensor) -> Tensor:
        """Return the weighted mean of values [n], one for each image that counts."""
        return values.mean() if self.total == len(values) else self.sum(values) / self.total

    @cached_property
    def total(self) -> float:
        """How many images they are worth together."""
        return float(self.weights.sum())


@dataclass(frozen=True)
class Selection:
    """How m leave-one-out images were chosen, bool [m] each, and how many images were corrected or confirmed in all.

    Images that were learned because they had been misclassified are harder than images are, those that were confirmed
    are easier: together, as often as they came, they are what images are.
    """

    learned: Tensor
    corrected: Tensor
    confirmed: Tensor
    num_corrected: int
    num_confirmed: int

    @property
    def known(self) -> Tensor:
        """Tell, bool [m], which images were not chosen because they were hard; all, if each was."""
        known = self.learned | self.confirmed
        return known if known.any() else torch.ones_like(known)

    def weights(self, loo: LooScores) -> ImageWeights:
        """Weigh images by how often such images come; `loo` has their scores in one column of spaces.

        If you correct every error, you need not confirm every prediction. So corrected images count as often as they came
        beside the confirmed ones, but no more often than learned images go wrong. Without confirmed ones they do not
        count.
        """
        weights = self.known.double()
        if self.num_confirmed and bool(self.confirmed.any()) and bool(self.corrected.any()):
            wrong = loo.true_class[:, 0] < loo.scores[..., 0].amax(dim=1) - 1e-9  # but for rounding
            errors, images = int(wrong[self.learned].sum()), int(self.learned.sum())
            expected = self.num_confirmed * (errors + 1) / (images - errors + 1)
            share = min(self.num_corrected, expected) / self.num_confirmed
            weights[self.corrected] = share * int(self.confirmed.sum()) / int(self.corrected.sum())
        return ImageWeights(weights)


@dataclass(frozen=True)
class LooScores:
    """Leave-one-out scores of m images in k feature spaces, in n columns: all classes, or some that stand for all."""

    scores: Tensor  # [m, n, k]
    log_count: Tensor  # [m, n]: logarithm of how many classes a column stands for
    true_class: Tensor  # [m, k]: score of the true class
    mean: Tensor  # [m, k]: mean score over classes
    max_similarity: Tensor  # [m, k]: greatest similarity to a class

    @classmethod
    def of(cls, scorers: Sequence[CoarseScorer]) -> LooScores:
        """Score the leave-one-out images of scorers that leave out the same images."""
        statistics = scorers[0].statistics
        if len(statistics.means) > MAX_CLASSES:
            return _loo_scores_blockwise(scorers, statistics.loo_labels)
        return cls.among_all(*_loo_scores(scorers, statistics.all_classes), statistics.loo_labels)

    @classmethod
    def of_parts(cls, scorer: CoarseScorer) -> LooScores:
        """Score the leave-one-out images of a scorer of few classes, part by part."""
        parts, similarities = scorer.loo_parts()
        return cls.among_all(torch.stack(parts, dim=-1), similarities[..., None], scorer.statistics.loo_labels)

    @classmethod
    def join(cls, parts: Sequence[LooScores]) -> LooScores:
        """Join the scores of the same images against all classes."""
        fields = ("scores", "true_class", "mean", "max_similarity")
        joined = {name: torch.cat([getattr(part, name) for part in parts], dim=-1) for name in fields}
        return cls(log_count=parts[0].log_count, **joined)

    @classmethod
    def among_all(cls, scores: Tensor, similarities: Tensor, labels: Tensor) -> LooScores:
        """Take scores and similarities [m, C, k] of all classes, and the true classes [m]."""
        true_class = scores[torch.arange(len(labels)), labels]
        log_count = scores.new_zeros(scores.shape[:2])
        return cls(scores, log_count, true_class, scores.mean(dim=1), similarities.amax(dim=1))

    def weights(self, spaces: Sequence[int], images: ImageWeights | None = None) -> list[float]:
        """Find weights, one per space, under which the true classes of images are most probable; None: of all images.

        Never negative. That nothing among m images went wrong does not mean that nothing ever will: image m + 1
        counts as one without information, which bounds the confidence.
        """
        images = images or ImageWeights(torch.ones(len(self.true_class), dtype=torch.double))
        chosen, rows = torch.tensor(spaces), images.mask
        log_count = self.log_count[rows]
        scores, true_class, mean = (x[rows][..., chosen] for x in (self.scores, self.true_class, self.mean))
        if not len(true_class):
            return [UNCALIBRATED_WEIGHT / len(spaces)] * len(spaces)
        logs = torch.full((len(spaces),), math.log(UNCALIBRATED_WEIGHT / len(spaces)), dtype=torch.double)
        logs.requires_grad_()
        smoothing = 1 / (images.total + 1)
        target = (1 - smoothing) * true_class + smoothing * mean

        def entropy() -> Tensor:
            return images.mean((scores @ logs.exp() + log_count).logsumexp(dim=1) - target @ logs.exp())

        _minimise(entropy, logs, 50)
        return logs.detach().exp().tolist()

    def weighted(self, shares: Tensor) -> LooScores:
        """Return the weighted sum of all scores as a single one."""
        scores, true_class, mean = ((x @ shares)[..., None] for x in (self.scores, self.true_class, self.mean))
        return LooScores(scores, self.log_count, true_class, mean, self.max_similarity[:, :1])

    def log_likelihood(self, space: int, weight: float, images: ImageWeights) -> float:
        """Return the mean log probability of the true classes of images by one space alone."""
        rows = images.mask
        total = (weight * self.scores[rows][..., space] + self.log_count[rows]).logsumexp(dim=1)
        return float(images.mean(weight * self.true_class[rows][:, space] - total))

    def shares(self, prior: Tensor, images: ImageWeights) -> Tensor:
        """Find the shares [k] of k scores, which add up to 1, by leave-one-out images.

        They minimise the squared Hellinger distance between probabilities and labels, 2 (1 - sqrt p) per image, with a
        Dirichlet prior worth `PRIOR_IMAGES` images. The distance is bounded: a few outliers cannot decide, as they
        would in the likelihood.
        """
        rows = images.mask
        scores, true_class, log_count = self.scores[rows], self.true_class[rows], self.log_count[rows]
        if not len(true_class):
            return prior
        logs = (UNCALIBRATED_WEIGHT * prior).log().requires_grad_()

        def distance() -> Tensor:
            chosen = true_class @ logs.exp() - (scores @ logs.exp() + log_count).logsumexp(dim=1)
            distances = 2 * images.sum(1 - (chosen / 2).exp())
            return (distances - PRIOR_IMAGES * prior @ logs.log_softmax(dim=0)) / images.total

        _minimise(distance, logs, 100)
        return logs.detach().softmax(dim=0)


def _minimise(loss: Callable[[], Tensor], parameters: Tensor, steps: int) -> None:
    """Minimise a loss over parameters, in place, by L-BFGS: SciPy's, since torch.optim takes seconds to import."""
    from scipy.optimize import minimize

    def value_and_gradient(point: np.ndarray) -> tuple[float, np.ndarray]:
        parameters.data.copy_(torch.from_numpy(point))
        value = loss()
        (gradient,) = torch.autograd.grad(value, parameters)
        return value.item(), gradient.numpy()

    options = {"maxiter": steps, "ftol": 1e-12, "gtol": 1e-7}
    start = parameters.detach().numpy().copy()
    found = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    parameters.data.copy_(torch.from_numpy(found.x))


def loo_probabilities(table: SummaryTable, labels: Tensor, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Predict stored images by leave-one-out in one feature space, some at a time.

    `table` has R summaries of C classes, `labels` [R] their classes. `images` [m] are prototypes, each one image of a
    class that has others. Yields some of `images` [b] and probabilities [b, C], each as if it had not been learned.
    """
    chunks = -(-len(images) // max_loo_images(int(labels.max()) + 1))
    weight: float | None = None
    for chunk in range(chunks):
        rows = images[chunk::chunks]  # of all classes, so that the first chunk can calibrate the weight
        scorer = CoarseScorer(table, labels, rows)
        scores, similarities = scorer.loo_scores()
        if weight is None:
            loo = LooScores.among_all(scores[..., None], similarities[..., None], scorer.statistics.loo_labels)
            (weight,) = loo.weights([0])
        yield rows, (weight * scores).softmax(dim=1)


def _loo_scores(scorers: Sequence[CoarseScorer], classes: slice) -> tuple[Tensor, Tensor]:
    """Scores and similarities [m, n, k] of a range of classes."""
    scores, similarities = zip(*(scorer.loo_scores(classes) for scorer in scorers), strict=True)
    return torch.stack(scores, dim=-1), torch.stack(similarities, dim=-1)


def _loo_scores_blockwise(scorers: Sequence[CoarseScorer], labels: Tensor) -> LooScores:
    """The same from blocks of classes, one after the other."""
    count, classes, spaces = len(labels), len(scorers[0].statistics.means), len(scorers)
    sample = torch.linspace(0, classes - 1, SAMPLED_CLASSES).round().long()
    nearest = torch.empty(count, 0, spaces, dtype=torch.double)  # scores of the most probable classes so far
    numbers = torch.empty(count, 0, dtype=torch.int64)  # and which classes they are
    true_class, total = torch.empty(count, spaces).double(), torch.zeros(count, spaces).double()
    max_similarity = torch.full((count, spaces), -torch.inf, dtype=torch.double)
    others = []
    for first in range(0, classes, _BLOCK):
        block = slice(first, min(first + _BLOCK, classes))
        scores, similarities = _loo_scores(scorers, block)
        images, columns = rows_in_class_range(labels, block)
        true_class[images] = scores[images, columns]
        total += scores.sum(dim=1)
        max_similarity = torch.maximum(max_similarity, similarities.amax(dim=1))
        others.append(scores[:, sample[(sample >= first) & (sample < block.stop)] - first])
        nearest, numbers = _most_probable(nearest, numbers, scores, first)
    places = torch.searchsorted(sample, numbers).clamp(max=SAMPLED_CLASSES - 1)
    places = places.where(sample[places] == numbers, SAMPLED_CLASSES)  # the end: not in the sample
    taken = torch.zeros(count, SAMPLED_CLASSES + 1, dtype=torch.bool).scatter_(1, places, True)[:, :-1]
    log_count = ((classes - NEAREST_CLASSES) / (~taken).sum(dim=1, keepdim=True).double()).log()
    sampled = log_count.expand_as(taken).masked_fill(taken, -torch.inf)
    log_count = torch.cat([log_count.new_zeros(count, NEAREST_CLASSES), sampled], dim=1)
    scores = torch.cat([nearest, *others], dim=1)
    return LooScores(scores, log_count, true_class, total / classes, max_similarity)


def _most_probable(nearest: Tensor, numbers: Tensor, scores: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Of the classes so far and a block [m, c, k] of classes from `first` on."""
    here = torch.arange(first, first + scores.shape[1]).expand(len(scores), -1)
    nearest, numbers = torch.cat([nearest, scores], dim=1), torch.cat([numbers, here], dim=1)
    best = nearest.sum(dim=2).topk(min(NEAREST_CLASSES, nearest.shape[1]), dim=1).indices
    return nearest.gather(1, best[:, :, None].expand(-1, -1, nearest.shape[2])), numbers.gather(1, best)
