"""Statistics of all classes in one feature space: from which the default classifier computes scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.evidence.summary_table import SummaryTable

# Images scored by leave-one-out: as many as keep images times classes below LOO_SCORES, within these bounds.
MIN_LOO_IMAGES, MAX_LOO_IMAGES = 200, 2_000
LOO_SCORES = 4_000_000
COVARIANCE_PROTOTYPES = 262_144  # for the covariance within classes; more make it no better
# Prototypes or classes in double precision at once: so few that their memory is reused. Allocation would take most of
# the time.
BLOCK = 2_048


@dataclass(frozen=True)
class ClassStatistics:
    """The summaries of C classes as matrices, in double precision but for the prototypes.

    A class may have several summaries, of different tasks.
    """

    table: SummaryTable  # P prototypes [P, D]
    space: int  # the feature space
    counts: Tensor  # [P]: images behind each prototype
    owners: Tensor  # [P]: the class of each
    summaries: Tensor  # [P]: the summary of each
    loo_rows: Tensor  # [m]: prototypes that are single images, of classes with further images
    sizes: Tensor  # [C]: images of each class
    means: Tensor  # [C, D]
    scatter: Tensor  # [D, D]: of images about their class means
    dof: float  # degrees of freedom of the scatter: images less one per class

    @classmethod
    def of(
        cls,
        summaries: Sequence[ClassSummary] | SummaryTable,
        labels: Tensor | None = None,
        loo_rows: Tensor | None = None,
        space: int = 0,
        spread: bool = True,
    ) -> ClassStatistics:
        """Compute the statistics of R summaries in one feature space.

        Without `labels` [R], each summary is a class of its own; without `loo_rows` [m], evenly spaced prototypes are
        scored by leave-one-out. `spread`: count the deviations of images from their prototypes.
        """
        table = summaries if isinstance(summaries, SummaryTable) else SummaryTable.of(summaries)
        labels = torch.arange(len(table.lengths)) if labels is None else labels
        counts, owner_summaries = table.counts.double(), table.owners
        owners, classes, dim = labels[owner_summaries], int(labels.max()) + 1, table.deviations.shape[1]
        sizes = torch.zeros(classes, dtype=torch.double).index_add_(0, owners, counts)
        means = torch.zeros(classes, dim, dtype=torch.double)
        for block in blocks(len(owners)):
            means.index_add_(0, owners[block], table.decoded(block, space) * counts[block, None])
        means /= sizes[:, None]
        in_sample = _covariance_classes(classes, len(owners))
        images = torch.zeros(len(labels), dtype=torch.double).index_add_(0, owner_summaries, counts)  # [R]
        squares = torch.zeros(dim, dtype=torch.double)
        for block in blocks(len(labels)) if spread else ():
            squares += (images * in_sample[labels])[block] @ table.deviations[block].double().square()
        scatter = torch.diag(squares)
        for rows in in_sample[owners].nonzero()[:, 0].split(BLOCK):
            residuals = (table.decoded(rows, space) - means[owners[rows]]) * counts[rows, None].sqrt()
            scatter += residuals.T @ residuals
        dof = float(((sizes - 1) * in_sample).sum())
        if loo_rows is None:
            exact = ~table.grouped & (sizes[owners] > 1)
            loo_rows = _evenly_spaced(exact.nonzero()[:, 0], max_loo_images(classes))
        return cls(table, space, counts, owners, owner_summaries, loo_rows, sizes, means, scatter, dof)

    def with_images(self, point: Tensor, count: float, label: int, is_new: bool) -> ClassStatistics:
        """Return the statistics with `count` more images at `point` [D] of class `label`; `is_new`: insert the class.

        Sizes, means and scatter are exact. Prototypes and leave-one-out images stay the same.
        """
        sizes, means = self.sizes.clone(), self.means.clone()
        if is_new:
            sizes = insert_row(sizes, label, torch.zeros(()))
            means = insert_row(means, label, point)
        size, residual = float(sizes[label]), point - means[label]
        sizes[label] += count
        means[label] += residual * (count / (size + count))
        scatter = self.scatter + torch.outer(residual, residual) * (size * count / (size + count))
        return dataclasses.replace(self, sizes=sizes, means=means, scatter=scatter, dof=self.dof + count - is_new)

    @property
    def points(self) -> Tensor:
        """float32 [P, D]: the prototypes."""
        return self.table.decoded(space=self.space)

    @property
    def loo_points(self) -> Tensor:
        """[m, D]: the images that are scored by leave-one-out, in double precision."""
        return self.table.decoded(self.loo_rows, self.space).double()

    @property
    def centre(self) -> Tensor:
        """[D]: the mean of all class means; of a single class, the origin."""
        return self.means.mean(dim=0) if len(self.means) > 1 else torch.zeros_like(self.means[0])

    @property
    def all_classes(self) -> slice:
        """The range of all classes."""
        return slice(0, len(self.means))

    @property
    def loo_labels(self) -> Tensor:
        """[m]: the true classes of the images that are scored by leave-one-out."""
        return self.owners[self.loo_rows]


def insert_row(rows: Tensor, place: int, row: Tensor) -> Tensor:
    """Insert a row into a tensor [N, ...]."""
    return torch.cat([rows[:place], row[None].to(rows), rows[place:]])


def blocks(count: int) -> Iterator[slice]:
    """Yield ranges of at most `BLOCK` of `count` rows."""
    return (slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))


def rows_in_class_range(labels: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Find the images, with labels [m], whose class lies in a range: return their rows and their classes' places in it."""
    in_range = (labels >= classes.start) & (labels < classes.stop)
    return in_range.nonzero()[:, 0], labels[in_range] - classes.start


def max_loo_images(classes: int) -> int:
    """Return how many images are scored by leave-one-out at once."""
    return max(MIN_LOO_IMAGES, min(MAX_LOO_IMAGES, LOO_SCORES // classes))


def _covariance_classes(classes: int, prototypes: int) -> Tensor:
    """Select the classes, bool [C], for the covariance: all, or evenly spaced ones with enough prototypes."""
    rows = torch.arange(0, classes, max(1.0, prototypes / COVARIANCE_PROTOTYPES), dtype=torch.double)
    return torch.zeros(classes, dtype=torch.bool).index_fill_(0, rows.long(), True)


def _evenly_spaced(rows: Tensor, count: int) -> Tensor:
    """Select at most `count` of the rows [n]."""
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), count)).round().long()]
