"""The points of all classes in one space, and what is summed over them: what evidence is computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.evidence.summary_table import SummaryTable

LEFT_OUT_LEAST, LEFT_OUT_MOST = 200, 2_000  # images to find weights from; between the two, ...
LEFT_OUT_LIMIT = 4_000_000  # ... so many that images times classes are below
COVARIANCE = 262_144  # points that the covariance within classes is taken from; more add nothing but time
# Points or classes in double precision at once: so few that their memory is used again instead of being asked for
# anew, which had taken most of the time.
BLOCK = 2_048


@dataclass(frozen=True)
class Space:
    """The sketches of C classes in one space as matrices, in double precision but for the points.

    A class may have several, of different tasks.
    """

    bulk: SummaryTable  # the points [P, D] among it
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
        sketches: Sequence[ClassSummary] | SummaryTable,
        labels: Tensor | None = None,
        left_out: Tensor | None = None,
    ) -> Space:
        """labels: [R], the class of each sketch as a number; without, each is of a class of its own."""
        bulk = sketches if isinstance(sketches, SummaryTable) else SummaryTable.of(sketches)
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
        for rows in spread[owners].nonzero()[:, 0].split(BLOCK):
            apart = (bulk.decoded(rows) - means[owners[rows]]) * counts[rows, None].sqrt()
            scatter += apart.T @ apart
        freedom = float(((sizes - 1) * spread).sum())
        place = torch.arange(len(owners)) - (bulk.lengths.cumsum(0) - bulk.lengths)[parts]
        single = (place < bulk.num_exact[parts]) & (sizes[owners] > 1)
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
    return (slice(first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))


def _spread_classes(classes: int, points: int) -> Tensor:
    """bool [C]: the classes whose points make the covariance: all, or evenly spread ones that have enough."""
    chosen = torch.arange(0, classes, max(1.0, points / COVARIANCE), dtype=torch.double).long()
    return torch.zeros(classes, dtype=torch.bool).index_fill_(0, chosen, True)


def places(owners: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Which of the images whose classes are `owners` [m] are of these classes, and where among them theirs is."""
    inside = (owners >= classes.start) & (owners < classes.stop)
    return inside.nonzero()[:, 0], owners[inside] - classes.start


def _some(rows: Tensor, classes: int) -> Tensor:
    """Rows [m] as they are, or as many as time and memory allow, spread evenly."""
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), most_left_out(classes))).round().long()]


def most_left_out(classes: int) -> int:
    """Images that are left out at once."""
    return max(LEFT_OUT_LEAST, min(LEFT_OUT_MOST, LEFT_OUT_LIMIT // classes))
