"""Score embeddings against all classes, from a few prototypes per class.

A score is a weighted sum of the whitened cosines to the class mean, one per feature space, and the logarithm of a
kernel ridge regression of class membership. All are closed forms over the prototypes, so classes are added and removed
without training. In one feature space the share of the regression is fixed; in several, `LooScores.shares` finds all shares.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.class_statistics import ClassStatistics, rows_in_class_range
from protosteer.evidence.kernel_ridge import KernelRidge
from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.evidence.summary_table import SummaryTable
from protosteer.evidence.whitened import WhitenedCosine, dot_means

RIDGE_SHARE = 0.3  # weight of the regression's logarithm, as a share of the whitened cosine's
RIDGE_FLOOR = 0.05  # the regression of zeros and ones is too coarse for smaller probabilities
RIDGE_FLOOR_SEVERAL = 0.02  # the same in several feature spaces
# Prior shares of several feature spaces: the last layer, each earlier space, the ridge.
PRIOR_LAST, PRIOR_EARLIER, PRIOR_RIDGE = 0.4, 0.16, 0.3


class CoarseScorer:
    """Scores embeddings against C classes in S feature spaces, and measures how similar they are to them.

    Similarity is the mean of the cosines to a class mean with and without whitening, in the first feature space. It is
    low for images of unknown classes. Whitening amplifies small differences between images; the cosine without it is
    low for images unlike any that were learned.
    """

    def __init__(
        self,
        summaries: Sequence[ClassSummary] | SummaryTable,
        labels: Tensor | None = None,
        loo_rows: Tensor | None = None,
    ):
        """Compute what scores need; for the arguments see `ClassStatistics.of`."""
        table = summaries if isinstance(summaries, SummaryTable) else SummaryTable.of(summaries)
        several = table.spaces > 1
        self.spaces = [ClassStatistics.of(table, labels, loo_rows, s, not several) for s in range(table.spaces)]
        self.statistics = self.spaces[0]
        self.whitened = [WhitenedCosine(statistics) for statistics in self.spaces]
        self.ridge = KernelRidge.of(self.spaces)
        self.ridge_floor = RIDGE_FLOOR_SEVERAL if several else RIDGE_FLOOR
        self.shares = _prior_shares(table.spaces, self.ridge is not None)
        self.lengths = self.statistics.means.norm(dim=1).clamp(min=1e-12)  # [C]

    def with_image(self, points: Sequence[Tensor], count: float, label: int, is_new: bool) -> CoarseScorer:
        """Return a scorer with `count` more images at one prototype, [D] in each feature space, of class `label`.

        Except for the shares of feature spaces and the regression's centre, it equals a scorer built from scratch.
        `is_new`: insert the class.
        """
        updated = copy.copy(self)
        pairs = zip(self.spaces, points, strict=True)
        updated.spaces = [statistics.with_images(point, count, label, is_new) for statistics, point in pairs]
        updated.statistics = updated.spaces[0]
        updated.whitened = [WhitenedCosine(statistics) for statistics in updated.spaces]
        updated.ridge = self.ridge and self.ridge.with_image(torch.cat(list(points)), count, label, is_new)
        updated.lengths = updated.statistics.means.norm(dim=1).clamp(min=1e-12)
        return updated

    @property
    def directions(self) -> Tensor:
        """[C, D]: the class means as unit vectors, in the first feature space."""
        return F.normalize(self.statistics.means, dim=1)

    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score embeddings [B, S * D] against all classes, or `classes`, [n] or [B, n] per image.

        Returns scores and similarities (cosines), each [B, C] or [B, n].
        """
        units = F.normalize(embeddings.double().unflatten(1, (len(self.spaces), -1)), dim=2)  # [B, S, D]
        parts = [whitened.scores(units[:, s], classes) for s, whitened in enumerate(self.whitened)]
        lengths = self.lengths if classes is None else self.lengths[classes]
        cosines = dot_means(units[:, 0], self.statistics.means, classes) / lengths
        similarities = (parts[0] + cosines) / 2
        if self.ridge:
            ridge = self.ridge.scores(units.flatten(1))
            if classes is not None:
                ridge = ridge[:, classes] if classes.ndim == 1 else ridge.gather(1, classes)
            parts.append(self._log_ridge(ridge))
        return self._weighted(parts), similarities

    def loo_parts(self, classes: slice | None = None) -> tuple[list[Tensor], Tensor]:
        """Score leave-one-out images, each as if not learned, against all classes or a range of them.

        Returns the parts [m, C] that `shares` weights, and similarities [m, C].
        """
        statistics, classes = self.statistics, classes or self.statistics.all_classes
        owners, points = statistics.loo_labels, statistics.loo_points
        cosines = points @ statistics.means[classes].T / self.lengths[classes]
        cells = rows_in_class_range(owners, classes)
        sums = statistics.sizes[owners][:, None] * statistics.means[owners] - points  # without the image
        cosines[cells] = F.cosine_similarity(points, sums, dim=1)[cells[0]]
        parts = [whitened.loo_scores(classes) for whitened in self.whitened]
        similarities = (parts[0] + cosines) / 2
        if self.ridge:
            parts.append(self._log_ridge(self.ridge.loo_scores[:, classes]))
        return parts, similarities

    def loo_scores(self, classes: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return scores and similarities [m, C] of leave-one-out images; see `loo_parts`."""
        parts, similarities = self.loo_parts(classes)
        return self._weighted(parts), similarities

    def _weighted(self, parts: Sequence[Tensor]) -> Tensor:
        head, *tail = (share * part for share, part in zip(self.shares, parts, strict=True))
        return sum(tail, head)

    def _log_ridge(self, ridge: Tensor) -> Tensor:
        return ridge.clamp(min=self.ridge_floor).log()


def _prior_shares(spaces: int, has_ridge: bool) -> Tensor:
    """Return prior shares, double [S (+ 1)], of the feature spaces, the last layer's first, and of the ridge."""
    if spaces == 1:
        return torch.tensor([1.0, RIDGE_SHARE][: 1 + has_ridge]).double()
    shares = [PRIOR_LAST, *[PRIOR_EARLIER] * (spaces - 1), *[PRIOR_RIDGE] * has_ridge]
    return torch.tensor(shares, dtype=torch.double) / sum(shares)
