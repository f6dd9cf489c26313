"""Calibrate the weights of feature spaces and scores by leave-one-out: no image need be held out.

The scores of all classes are never in memory at once: beyond `MAX_CLASSES` classes they are computed block by block.
For each image the most probable classes are kept. An evenly spaced sample of classes stands for all others in a sum.
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

UNCALIBRATED_WEIGHT = 10.0  # of scores without any leave-one-out image
MAX_CLASSES = 20_000  # with more, the sums of an image are over its most probable classes and a sample
NEAREST_CLASSES, SAMPLED_CLASSES = 256, 4_096
_BLOCK = 4_096  # classes scored at once
PRIOR_IMAGES = 20.0  # leave-one-out images that the prior shares of several feature spaces are worth


@dataclass(frozen=True)
class ImageWeights:
    """How much each of m leave-one-out images counts in calibration."""

    weights: Tensor  # double [m], at least 0

    @cached_property
    def mask(self) -> Tensor:
        """Bool [m]: which images have a weight above 0."""
        return self.weights > 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the weighted sum of values [n], one for each image that counts."""
        weights = self.weights[self.mask]
        return values.sum() if bool((weights == 1).all()) else weights @ values

    def mean(self, values: Tensor) -> Tensor:
        """Return the weighted mean of values [n], one for each image that counts."""
        return values.mean() if self.total == len(values) else self.sum(values) / self.total

    @cached_property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self.weights.sum())


@dataclass(frozen=True)
class Selection:
    """How m leave-one-out images were chosen, bool [m] each, and how many images were corrected or confirmed in all.

    Images learned because they were misclassified are harder than a random image, confirmed ones are easier. Together,
    in the proportion in which they came, they are as hard as a random image.
    """

    learned: Tensor
    corrected: Tensor
    confirmed: Tensor
    num_corrected: int
    num_confirmed: int

    @property
    def representative(self) -> Tensor:
        """Bool [m]: which images were not chosen because they were misclassified; all, if each was."""
        mask = self.learned | self.confirmed
        return mask if mask.any() else torch.ones_like(mask)

    def weights(self, loo: LooScores) -> ImageWeights:
        """Weigh images by how often such images come; `loo` has their scores in one feature space.

        If you correct every error, you need not confirm every prediction. So corrected images count as often as they came
        beside the confirmed ones, but no more often than learned images are misclassified. Without confirmed ones they
        do not count.
        """
        weights = self.representative.double()
        if self.num_confirmed and bool(self.confirmed.any()) and bool(self.corrected.any()):
            is_wrong = loo.true_class[:, 0] < loo.scores[..., 0].amax(dim=1) - 1e-9  # up to rounding
            errors, images = int(is_wrong[self.learned].sum()), int(self.learned.sum())
            max_corrected = self.num_confirmed * (errors + 1) / (images - errors + 1)
            share = min(self.num_corrected, max_corrected) / self.num_confirmed
            weights[self.corrected] = share * int(self.confirmed.sum()) / int(self.corrected.sum())
        return ImageWeights(weights)


@dataclass(frozen=True)
class LooScores:
    """Leave-one-out scores of m images in k feature spaces and n columns: all classes, or a sample that stands for all."""

    scores: Tensor  # [m, n, k]
    log_count: Tensor  # [m, n]: logarithm of how many classes a column stands for
    true_class: Tensor  # [m, k]: score of the true class
    mean: Tensor  # [m, k]: mean score over classes
    max_similarity: Tensor  # [m, k]: greatest similarity to a class

    @classmethod
    def of(cls, scorers: Sequence[CoarseScorer]) -> LooScores:
        """Score the leave-one-out images of k scorers, which are the same for each."""
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
        columns = {name: torch.cat([getattr(part, name) for part in parts], dim=-1) for name in fields}
        return cls(log_count=parts[0].log_count, **columns)

    @classmethod
    def among_all(cls, scores: Tensor, similarities: Tensor, labels: Tensor) -> LooScores:
        """Collect scores and similarities [m, C, k] of all classes; `labels` [m] are the true classes."""
        true_class = scores[torch.arange(len(labels)), labels]
        log_count = scores.new_zeros(scores.shape[:2])
        return cls(scores, log_count, true_class, scores.mean(dim=1), similarities.amax(dim=1))

    def weights(self, spaces: Sequence[int], images: ImageWeights | None = None) -> list[float]:
        """Fit one weight per space, above 0, so that the true classes of images are most probable; None: of all images.

        Labels are smoothed by 1 / (m + 1), as if one more image had no label. That bounds the confidence even if all m
        images are classified correctly.
        """
        images = images or ImageWeights(torch.ones(len(self.true_class), dtype=torch.double))
        columns, rows = torch.tensor(spaces), images.mask
        log_count = self.log_count[rows]
        scores, true_class, mean = (x[rows][..., columns] for x in (self.scores, self.true_class, self.mean))
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
        """Sum the scores of k spaces, weighted by shares [k], to one column of spaces."""
        scores, true_class, mean = ((x @ shares)[..., None] for x in (self.scores, self.true_class, self.mean))
        return LooScores(scores, self.log_count, true_class, mean, self.max_similarity[:, :1])

    def log_likelihood(self, space: int, weight: float, images: ImageWeights) -> float:
        """Return the mean log probability of the true classes of images, by one space only."""
        rows = images.mask
        total = (weight * self.scores[rows][..., space] + self.log_count[rows]).logsumexp(dim=1)
        return float(images.mean(weight * self.true_class[rows][:, space] - total))

    def shares(self, prior: Tensor, images: ImageWeights) -> Tensor:
        """Fit the shares [k] of k scores, which add up to 1, to leave-one-out images; `prior` [k] are shares as well.

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
            log_probs = true_class @ logs.exp() - (scores @ logs.exp() + log_count).logsumexp(dim=1)
            distances = 2 * images.sum(1 - (log_probs / 2).exp())
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
    solution = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    parameters.data.copy_(torch.from_numpy(solution.x))


def loo_probabilities(table: SummaryTable, labels: Tensor, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Predict stored images by leave-one-out in one feature space, in chunks.

    `table` has R summaries of C classes, `labels` [R] their classes. `images` [m] are prototypes, each one image of a
    class that has others. Yields chunks of `images` [b] and their probabilities [b, C], each as if it had not been learned.
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
    """Compute scores and similarities [m, n, k] of a range of n classes by k scorers."""
    scores, similarities = zip(*(scorer.loo_scores(classes) for scorer in scorers), strict=True)
    return torch.stack(scores, dim=-1), torch.stack(similarities, dim=-1)


def _loo_scores_blockwise(scorers: Sequence[CoarseScorer], labels: Tensor) -> LooScores:
    """Compute leave-one-out scores of images with labels [m] from blocks of classes, one after the other."""
    count, classes, spaces = len(labels), len(scorers[0].statistics.means), len(scorers)
    sample = torch.linspace(0, classes - 1, SAMPLED_CLASSES).round().long()
    nearest = torch.empty(count, 0, spaces, dtype=torch.double)  # scores of the most probable classes so far
    numbers = torch.empty(count, 0, dtype=torch.int64)  # the classes of `nearest`
    true_class, total = torch.empty(count, spaces).double(), torch.zeros(count, spaces).double()
    max_similarity = torch.full((count, spaces), -torch.inf, dtype=torch.double)
    sample_scores = []
    for start in range(0, classes, _BLOCK):
        block = slice(start, min(start + _BLOCK, classes))
        scores, similarities = _loo_scores(scorers, block)
        images, columns = rows_in_class_range(labels, block)
        true_class[images] = scores[images, columns]
        total += scores.sum(dim=1)
        max_similarity = torch.maximum(max_similarity, similarities.amax(dim=1))
        sample_scores.append(scores[:, sample[(sample >= start) & (sample < block.stop)] - start])
        nearest, numbers = _most_probable(nearest, numbers, scores, start)
    places = torch.searchsorted(sample, numbers).clamp(max=SAMPLED_CLASSES - 1)
    places = places.where(sample[places] == numbers, SAMPLED_CLASSES)  # one past the end: not in the sample
    is_nearest = torch.zeros(count, SAMPLED_CLASSES + 1, dtype=torch.bool).scatter_(1, places, True)[:, :-1]
    log_count = ((classes - NEAREST_CLASSES) / (~is_nearest).sum(dim=1, keepdim=True).double()).log()
    log_counts = log_count.expand_as(is_nearest).masked_fill(is_nearest, -torch.inf)
    log_count = torch.cat([log_count.new_zeros(count, NEAREST_CLASSES), log_counts], dim=1)
    scores = torch.cat([nearest, *sample_scores], dim=1)
    return LooScores(scores, log_count, true_class, total / classes, max_similarity)


def _most_probable(nearest: Tensor, numbers: Tensor, scores: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Keep the most probable of the classes so far, with their numbers, and a block [m, c, k] of classes from `start` on."""
    block = torch.arange(start, start + scores.shape[1]).expand(len(scores), -1)
    nearest, numbers = torch.cat([nearest, scores], dim=1), torch.cat([numbers, block], dim=1)
    columns = nearest.sum(dim=2).topk(min(NEAREST_CLASSES, nearest.shape[1]), dim=1).indices
    return nearest.gather(1, columns[:, :, None].expand(-1, -1, nearest.shape[2])), numbers.gather(1, columns)
