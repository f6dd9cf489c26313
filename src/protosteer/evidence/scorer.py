"""Score embeddings against all classes in one feature space, from a few prototypes per class.

A score is the whitened cosine to the class mean plus the logarithm of a kernel ridge regression of class
membership. Both are closed forms over the prototypes, so classes come and go without training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.class_statistics import ClassStatistics, rows_in_class_range
from protosteer.evidence.kernel_ridge import KernelRidge
from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.evidence.summary_table import SummaryTable
from protosteer.evidence.whitened import WhitenedCosine, dot_means

RIDGE_SHARE = 0.3  # weight of the regression's logarithm, as a share of the whitened cosine's
RIDGE_FLOOR = 0.05  # a regression on zeros and ones says nothing about smaller probabilities


class CoarseScorer:
    """Scores embeddings against C classes, and measures how similar they are to them.

    Similarity is the mean of the cosines to a class mean with and without whitening. It tells images that are like
    no class: whitening sees small differences; without it, an image must lie where images lie at all.
    """

    def __init__(
        self,
        summaries: Sequence[ClassSummary] | SummaryTable,
        labels: Tensor | None = None,
        loo_rows: Tensor | None = None,
    ):
        """Compute what scores need; for the arguments see `ClassStatistics.of`."""
        self.statistics = ClassStatistics.of(summaries, labels, loo_rows)
        self.whitened = WhitenedCosine(self.statistics)
        self.ridge = KernelRidge.of(self.statistics)
        self.lengths = self.statistics.means.norm(dim=1).clamp(min=1e-12)  # [C]

    @property
    def directions(self) -> Tensor:
        """[C, D]: the class means as unit vectors."""
        return F.normalize(self.statistics.means, dim=1)

    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score embeddings [B, D] against all classes, [n] or for each image its own [B, n].

        Returns scores and similarities (cosines), each [B, C] or [B, n].
        """
        unit = F.normalize(embeddings.double(), dim=1)
        whitened = self.whitened.scores(unit, classes)
        lengths = self.lengths if classes is None else self.lengths[classes]
        plain = dot_means(unit, self.statistics.means, classes) / lengths
        ridge = self.ridge.scores(unit) if self.ridge else None
        if ridge is not None and classes is not None:
            ridge = ridge[:, classes] if classes.ndim == 1 else ridge.gather(1, classes)
        return _combine(whitened, ridge, plain)

    def loo_scores(self, classes: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return scores and similarities [m, C] of leave-one-out images, each as if not learned; or a range of classes."""
        statistics = self.statistics
        owners, classes = statistics.loo_labels, classes or statistics.all_classes
        points = statistics.table.decoded(statistics.loo_rows).double()
        plain = points @ statistics.means[classes].T / self.lengths[classes]
        own = rows_in_class_range(owners, classes)
        others = statistics.sizes[owners][:, None] * statistics.means[owners] - points
        plain[own] = F.cosine_similarity(points, others, dim=1)[own[0]]
        ridge = self.ridge.loo_scores[:, classes] if self.ridge else None
        return _combine(self.whitened.loo_scores(classes), ridge, plain)


def _combine(whitened: Tensor, ridge: Tensor | None, plain: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and similarities of three kinds of scores, of one shape."""
    scores = whitened if ridge is None else whitened + RIDGE_SHARE * ridge.clamp(min=RIDGE_FLOOR).log()
    return scores, (whitened + plain) / 2
