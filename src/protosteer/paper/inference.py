"""Prediction, Algorithm 2 of the paper.

1. q = f(x), without a prompt. The r key prototypes most similar to q name the candidate tasks.
2. q_j = f(x) under prompt P^j, for each candidate j.
3. The prediction is the class of the value prototype most similar to any q_j, over all classes learned (Eq. 7).

All pairs of an image and a candidate are embedded in common batches, each under its candidate's prompt. The number of
forward passes does not depend on the number of tasks. A prediction does not depend on the other images of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.paper.prompts import Embed

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class PrototypeIndex:
    """The prototypes of T tasks and C classes, as unit vectors; tasks and classes are numbered from 0."""

    keys: Tensor  # [K, D]: U, of all tasks
    key_tasks: Tensor  # [K]: the task of each key prototype
    values: Tensor  # [V, D]: U hat, of all classes
    value_classes: Tensor  # [V]: the class of each value prototype
    prompt_tasks: Tensor  # [T]: for each task, the task whose prompt it uses, usually itself; -1: no prompt
    num_classes: int


@dataclass(frozen=True)
class Matches:
    """Class scores of B images, and how they came about."""

    scores: Tensor  # [B, C]: in Algorithm 2 the greatest cosine to a value prototype of the class, over all q_j
    candidates: Tensor  # bool [B, T]: the tasks retrieved
    winners: Tensor  # [B]: the task under whose prompt the greatest score was reached
    embeddings: Tensor  # [B, D]: the embedding under that prompt
    passes: Tensor  # int64 [B]: forward passes per image

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the matches of several batches."""
        names = [name for name, column in vars(parts[0]).items() if column is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def match(index: PrototypeIndex, embed: Embed, count: int, neighbours: int) -> Matches:
    """Run Algorithm 2 on B images: return their class scores, candidates and embeddings.

    Args:
        index: The prototypes of all tasks.
        embed: Embeds images, by rows 0 to B - 1, under the prompts of tasks.
        count: B.
        neighbours: r, the number of key prototypes retrieved.
    """
    queries = embed(torch.arange(count), None)  # [B, D]: q
    candidates = retrieve(index, queries, neighbours)  # bool [B, T]
    images, tasks = _prompted_pairs(index, candidates)  # [m], [m]
    embeddings = embed(images, tasks) if len(images) else queries[:0]  # [m, D]: q_j

    maxima = _RunningMax(index, queries)
    # Candidates without a prompt share one embedding, the query itself.
    promptless = (candidates & (index.prompt_tasks < 0)).int()  # [B, T]
    rows = promptless.any(dim=1).nonzero()[:, 0]
    maxima.update(rows, promptless[rows].argmax(dim=1), queries[rows])
    for pairs in _kth_pair_per_image(images):
        maxima.update(images[pairs], tasks[pairs], embeddings[pairs])
    passes = 1 + torch.bincount(images, minlength=count)
    return Matches(maxima.scores, candidates, maxima.tasks, maxima.embeddings, passes)


def retrieve(index: PrototypeIndex, queries: Tensor, neighbours: int) -> Tensor:
    """Find the tasks, bool [B, T], of the r key prototypes most similar to each query [B, D]: step 1."""
    similarity = F.normalize(queries, dim=1) @ index.keys.T  # [B, K]
    nearest = similarity.topk(min(neighbours, len(index.keys)), dim=1).indices  # [B, r]
    candidates = torch.zeros(len(queries), len(index.prompt_tasks), dtype=torch.bool)
    return candidates.scatter_(1, index.key_tasks[nearest], True)


def class_scores(index: PrototypeIndex, embeddings: Tensor) -> Tensor:
    """Return, for embeddings [B, D], the greatest cosine to a value prototype of each class, [B, C]: step 3."""
    similarity = F.normalize(embeddings, dim=1) @ index.values.T  # [B, V]
    scores = torch.full((len(embeddings), index.num_classes), -torch.inf)
    return scores.scatter_reduce_(1, index.value_classes.expand(len(embeddings), -1), similarity, "amax")


def _prompted_pairs(index: PrototypeIndex, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return images [m], ascending, and the tasks [m] whose prompts to run on them; a shared prompt is run once."""
    images, tasks = candidates.nonzero().T
    owners = index.prompt_tasks[tasks]
    pairs = torch.zeros_like(candidates)
    pairs[images[owners >= 0], owners[owners >= 0]] = True
    images, tasks = pairs.nonzero().T
    return images, tasks


def _kth_pair_per_image(images: Tensor) -> Iterator[Tensor]:
    """Yield positions in `images` [m], which ascend: of each image's first pair, then of each second one, and so on.

    In this order, only one score per image and class is in memory at a time.
    """
    k = torch.arange(len(images)) - torch.searchsorted(images, images)
    for number in range(int(k.max()) + 1 if len(k) else 0):
        yield (k == number).nonzero()[:, 0]


class _RunningMax:
    """Greatest scores [B, C] over the embeddings added so far; tasks [B] and embeddings [B, D] of the greatest of all."""

    def __init__(self, index: PrototypeIndex, queries: Tensor):
        self.index = index
        self.scores = torch.full((len(queries), index.num_classes), -torch.inf)
        self.tasks = torch.zeros(len(queries), dtype=torch.long)
        self.embeddings = queries.clone()

    def update(self, images: Tensor, tasks: Tensor, embeddings: Tensor) -> None:
        """Add embeddings [m, D] of distinct images [m], each under the prompt of a task [m]."""
        if not len(images):
            return
        scores, maxima = class_scores(self.index, embeddings), self.scores[images]  # [m, C]
        is_greater = scores.amax(dim=1) > maxima.amax(dim=1)  # [m]
        self.tasks[images[is_greater]] = tasks[is_greater]
        self.embeddings[images[is_greater]] = embeddings[is_greater]
        self.scores[images] = torch.maximum(scores, maxima)
