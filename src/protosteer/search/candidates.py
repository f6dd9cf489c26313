"""Coarse evidence for some of very many classes: the candidates of each image, and what stands for all others.

Candidates are found in the first view and scored as they would be among all. The others matter only as the rest of
the probability: it is taken from a sample of the classes, evenly spread, each of which stands for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.scorer import Coarse
from protosteer.search.ivf import Partition, search

FROM = 20_000  # classes; from so many on, not all of them are scored
CANDIDATES = 64  # of each image
SAMPLE = 1024  # classes that stand for the rest


class Shortlist:
    """Over the whitened class means of a view, whose classes have these names."""

    def __init__(self, coarse: Coarse, names: Sequence[str], known: Partition | None = None):
        """known: of the same classes or others, from before."""
        self.whitened = coarse.whitened
        vectors = self.whitened.units(coarse.space.means)
        self.search, self.partition = search(names, vectors, known)
        self.sample = Sample(len(vectors))

    def of(self, embeddings: Tensor) -> Scored:
        """What to score of images whose embeddings in this view are [B, D]."""
        units = self.whitened.units(F.normalize(embeddings.double(), dim=1))
        return self.sample.scored(self.search.nearest(units, min(CANDIDATES, self.sample.classes)))


class Sample:
    """Some of all classes, evenly spread, that stand for those that are no candidates."""

    def __init__(self, classes: int):
        self.classes = classes
        self.numbers = torch.linspace(0, classes - 1, min(SAMPLE, classes)).round().long().unique()
        self._places = torch.full((classes,), len(self.numbers))  # in the sample; its end for all others
        self._places[self.numbers] = torch.arange(len(self.numbers))

    def scored(self, columns: Tensor) -> Scored:
        """Candidates [B, n] of images, and what is left of the sample."""
        taken = torch.zeros(len(columns), len(self.numbers) + 1, dtype=torch.bool)
        taken = taken.scatter_(1, self._places[columns], True)[:, :-1]
        others, free = self.classes - columns.shape[1], (~taken).sum(dim=1, keepdim=True)
        many = (others / free.clamp(min=1).double()).log().expand(-1, len(self.numbers))
        return Scored(columns, self.numbers, many.masked_fill(taken, -torch.inf))


@dataclass(frozen=True)
class Scored:
    """The classes that are scored of B images: all of them, or candidates, and behind these the sample."""

    columns: Tensor | None = None  # [B, n]
    sample: Tensor | None = None  # [S]
    many: Tensor | None = None  # [B, S]: logarithm of how many classes each stands for; a candidate for none

    def rows(self, rows: Tensor) -> Scored:
        """Of some of the images."""
        if self.columns is None or self.many is None:
            return self
        return Scored(self.columns[rows], self.sample, self.many[rows])

    def scores(self, coarse: Coarse, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Evidence [B, C] or [B, n + S], and similarities, of embeddings [B, D]."""
        if self.columns is None:
            return coarse.scores(embeddings)
        parts = (coarse.scores(embeddings, classes) for classes in (self.columns, self.sample))
        evidence, similarities = zip(*parts, strict=True)
        return torch.cat(evidence, dim=1), torch.cat(similarities, dim=1)

    def posterior(self, logits: Tensor) -> Tensor:
        """Probabilities [B, C] or, of the candidates, [B, n]."""
        rest = self.rest(logits)
        if rest is None:
            return logits.softmax(dim=1)
        return torch.cat([self.candidates(logits), rest[:, None]], dim=1).softmax(dim=1)[:, :-1]

    def candidates(self, columns: Tensor) -> Tensor:
        """Without the sample."""
        return columns if self.columns is None else columns[:, : self.columns.shape[1]]

    def rest(self, logits: Tensor) -> Tensor | None:
        """[B]: one logit for all other classes together; None where there are none."""
        if self.columns is None or self.many is None:
            return None
        return (logits[:, self.columns.shape[1] :] + self.many).logsumexp(dim=1)
