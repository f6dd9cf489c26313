"""The paper's rule among very many classes: keys and value centroids that lie nearest are found by a search.

Those who look at all of them and these get the same wherever the search finds what lies nearest. The classes of the
value centroids found are candidates, and are scored as among all: by each of their centroids, under each prompt. What
stands for all other classes in probabilities is a sample of them, as it is by evidence (`shortlist.py`).
"""

from __future__ import annotations

import hashlib
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.paper.inference import Best, Index, Matches
from protosteer.search import candidates
from protosteer.search.candidates import CANDIDATES, Sample
from protosteer.search.ivf import Partition, search


class Nearby:
    """The keys and values of an index, each with a search."""

    def __init__(self, index: Index, temperature: float, known: Nearby | None = None):
        """known: of the same centroids or others, from before."""
        self.index, self.temperature = index, temperature
        before = known.partitions if known else (None, None)
        self.keys, keys = search(_names(index.keys), index.keys, before[0])
        self.values, values = search(_names(index.values), index.values, before[1])
        self.partitions: tuple[Partition | None, Partition | None] = keys, values
        self.sample = Sample(len(index.classes))
        # Centroids class by class: where each class begins, and how many it has.
        self._order = index.value_classes.argsort(stable=True)
        self._counts = index.value_classes.bincount(minlength=len(index.classes))
        self._starts = self._counts.cumsum(0) - self._counts

    @classmethod
    def of(cls, index: Index, temperature: float, known: Nearby | None) -> Nearby | None:
        """None where classes are so few that all are scored; the known one, if it is of this index."""
        if len(index.classes) < candidates.FROM:
            return None
        return known if known and known.index is index else cls(index, temperature, known)

    def best(self, queries: Tensor) -> Nearest:
        return Nearest(self, queries)

    def centroids(self, classes: Tensor) -> Tensor:
        """[..., c, D] of classes [...]; where one has fewer than others, its last is repeated."""
        places = torch.arange(int(self._counts[classes].max())).expand(*classes.shape, -1)
        places = self._starts[classes][..., None] + places.minimum(self._counts[classes][..., None] - 1)
        return self.index.values[self._order[places]]


class Nearest(Best):
    """Of every image the value centroids that lie nearest so far, and the task and embedding behind the nearest."""

    def __init__(self, nearby: Nearby, queries: Tensor):
        super().__init__(queries)
        self.nearby, self.index = nearby, nearby.index
        self.greatest = torch.full((len(queries),), -torch.inf)
        self.offered: list[tuple[Tensor, Tensor]] = []  # images [m] and their unit vectors [m, D]
        self.found = torch.empty(
            len(queries), 0, dtype=torch.int64
        )  # classes [B, ...], and how near they are
        self.cosines = torch.empty(len(queries), 0)

    def offer(self, images: Tensor, tasks: Tensor, embeddings: Tensor) -> None:
        if not len(images):
            return
        units = F.normalize(embeddings, dim=1)
        places = self.nearby.values.nearest(units, min(CANDIDATES, len(self.index.values)))
        cosines = (self.index.values[places] @ units[:, :, None])[:, :, 0]
        won = cosines.amax(dim=1) > self.greatest[images]
        self.keep(images[won], tasks[won], embeddings[won])
        self.greatest[images] = self.greatest[images].maximum(cosines.amax(dim=1))
        self.offered.append((images, units))
        shape = (len(self.found), places.shape[1])
        classes = torch.zeros(shape, dtype=torch.int64).index_copy_(
            0, images, self.index.value_classes[places]
        )
        near = torch.full(shape, -torch.inf).index_copy_(0, images, cosines)
        self.found, self.cosines = torch.cat([self.found, classes], 1), torch.cat([self.cosines, near], 1)

    def matches(self, candidates: Tensor, passes: Tensor) -> Matches:
        scored, temperature = self.nearby.sample.scored(self._columns()), self.nearby.temperature
        columns, sample = scored.columns, scored.sample
        assert columns is not None and sample is not None
        scores = torch.full((len(columns), columns.shape[1] + len(sample)), -torch.inf)
        for images, units in self.offered:
            own = (self.nearby.centroids(columns[images]) @ units[:, None, :, None])[..., 0].amax(dim=2)
            others = (self.nearby.centroids(sample) @ units.T).amax(dim=1).T
            scores[images] = scores[images].maximum(torch.cat([own, others], dim=1))
        rest = scored.rest(scores / temperature)
        assert rest is not None
        shown = scored.candidates(scores)
        return Matches(
            shown,
            shown,
            candidates,
            self.tasks,
            self.embeddings,
            passes,
            columns,
            (temperature * rest).float(),
        )

    def _columns(self) -> Tensor:
        """[B, n]: different classes of each image, the nearest first; where too few were found, any others."""
        count = min(CANDIDATES, len(self.index.classes))
        order = self.cosines.argsort(dim=1, descending=True, stable=True)
        found = self.found.gather(1, order).where(self.cosines.gather(1, order) > -torch.inf, -1)
        rows = [[c for c in dict.fromkeys(row) if c >= 0] for row in found.tolist()]
        return torch.tensor([list(islice(dict.fromkeys([*row, *range(count)]), count)) for row in rows])


def _names(vectors: Tensor) -> list[str]:
    """By which a centroid is known again, whatever class or place it has."""
    return [hashlib.sha256(row).hexdigest() for row in vectors.contiguous().numpy()]
