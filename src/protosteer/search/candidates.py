"""Score a few candidate classes of each image where classes are very many, and estimate the total of the others.

Candidates are found in the first feature space and scored as among all classes. The other classes matter only as the
remaining probability, which an evenly spaced sample of the classes estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from protosteer.search.ivf import IVFOptions, build_search


@dataclass(frozen=True)
class CandidateOptions:
    """When classes are so many that only candidates are scored, and how candidates are found."""

    min_classes: int = 20_000  # with fewer, all classes are scored
    candidates: int = 64  # of each image
    sample: int = 1024  # classes that stand for all others
    ivf: IVFOptions = field(default_factory=IVFOptions)


class Scorer(Protocol):
    """Scores embeddings against classes."""

    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return scores and similarities of embeddings [B, D] and all C classes, or `classes`, [n] or [B, n]."""


class CandidateSearch:
    """Finds the candidates of images among the unit vectors [C, D] of all classes."""

    def __init__(self, vectors: Tensor, options: CandidateOptions):
        self.search = build_search(vectors, options.ivf)
        self.classes, self.count = len(vectors), min(options.candidates, len(vectors))
        sample = torch.linspace(0, self.classes - 1, min(options.sample, self.classes))
        self.sample = sample.round().long().unique()
        self._sample_rows = torch.full((self.classes,), len(self.sample))  # one past the end: not in the sample
        self._sample_rows[self.sample] = torch.arange(len(self.sample))

    def find(self, queries: Tensor) -> ScoredClasses:
        """Select the classes to score for queries [B, D], unit vectors like those of the classes."""
        class_ids = self.search.nearest(queries, self.count)
        is_candidate = torch.zeros(len(class_ids), len(self.sample) + 1, dtype=torch.bool)
        is_candidate = is_candidate.scatter_(1, self._sample_rows[class_ids], True)[:, :-1]
        samples = (~is_candidate).sum(dim=1, keepdim=True)
        log_count = ((self.classes - self.count) / samples.clamp(min=1).double()).log().expand(-1, len(self.sample))
        return ScoredClasses(class_ids, self.sample, log_count.masked_fill(is_candidate, -torch.inf))


@dataclass(frozen=True)
class ScoredClasses:
    """The classes scored for B images: all, or n candidates followed by a sample of S classes."""

    class_ids: Tensor | None = None  # [B, n]: the candidates; None: all classes, in their order
    sample: Tensor | None = None  # [S]
    log_count: Tensor | None = None  # [B, S]: log of how many classes each stands for; -inf for a candidate

    def rows(self, rows: Tensor) -> ScoredClasses:
        """Select some of the images [m]."""
        if self.class_ids is None or self.log_count is None:
            return self
        return ScoredClasses(self.class_ids[rows], self.sample, self.log_count[rows])

    def scores(self, scorer: Scorer, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Score embeddings [B, D]: scores and similarities, [B, C] or [B, n + S]."""
        if self.class_ids is None:
            return scorer.scores(embeddings)
        parts = (scorer.scores(embeddings, classes) for classes in (self.class_ids, self.sample))
        scores, similarities = zip(*parts, strict=True)
        return torch.cat(scores, dim=1), torch.cat(similarities, dim=1)

    def posterior(self, logits: Tensor) -> Tensor:
        """Turn logits [B, C] or [B, n + S] into probabilities [B, C] or [B, n]."""
        log_other_mass = self.log_other_mass(logits)
        if log_other_mass is None:
            return logits.softmax(dim=1)
        return torch.cat([self.without_sample(logits), log_other_mass[:, None]], dim=1).softmax(dim=1)[:, :-1]

    def without_sample(self, columns: Tensor) -> Tensor:
        """Drop the columns of the sample: [B, C] or [B, n]."""
        return columns if self.class_ids is None else columns[:, : self.class_ids.shape[1]]

    def log_other_mass(self, logits: Tensor) -> Tensor | None:
        """Estimate one logit [B] for all other classes together; None if all classes are scored."""
        if self.class_ids is None or self.log_count is None:
            return None
        return (logits[:, self.class_ids.shape[1] :] + self.log_count).logsumexp(dim=1)
