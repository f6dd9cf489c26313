"""Prediction, Algorithm 2 of the paper.

1. q = f(x), without a prompt. The r key prototypes most similar to q name the candidate tasks.
2. q_j = f(x) under prompt P^j, for each candidate j.
3. The class of the value prototype most similar to any q_j, over all classes learned (Eq. 7).

All pairs of an image and a candidate are embedded together, each under its own prompt, so that the cost does not
depend on the number of tasks. Each row of the result depends on its own image alone.
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
    """The prototypes of T tasks and C classes, which are numbers here; prototypes are unit vectors."""

    keys: Tensor  # [K, D]: U
    key_tasks: Tensor  # [K]: the task of each
    values: Tensor  # [V, D]: U hat
    value_classes: Tensor  # [V]: the class of each
    prompt_tasks: Tensor  # [T]: the task whose prompt each uses, usually its own; -1: no prompt
    num_classes: int


@dataclass(frozen=True)
class Matches:
    """What inference finds for B images."""

    scores: Tensor  # [B, C]: the greatest wins; here, the greatest cosine to a class's value prototypes
    candidates: Tensor  # bool [B, T]: the tasks retrieved
    winners: Tensor  # [B]: the task under whose prompt the best match was made
    embeddings: Tensor  # [B, D]: the image under that prompt
    passes: Tensor  # int64 [B]: forward passes per image

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the matches of several batches."""
        names = [name for name, column in vars(parts[0]).items() if column is not None]
        return cls(**{n: torch.cat([getattr(part, n) for part in parts]) for n in names})


def match(index: PrototypeIndex, embed: Embed, count: int, neighbours: int) -> Matches:
    """Run Algorithm 2 on `count` images that `embed` knows as rows 0 to count - 1.

    Args:
        index: What has been learned.
        embed: Embeds images under the prompts of tasks.
        count: B.
        neighbours: r, the number of key prototypes retrieved.
    """
    queries = embed(torch.arange(count), None)  # [B, D]: q
    candidates = retrieve(index, queries, neighbours)  # bool [B, T]
    images, tasks = _prompted_pairs(index, candidates)  # [m], [m]
    embeddings = embed(images, tasks) if len(images) else queries[:0]  # [m, D]: q_j

    best = _BestMatch(index, queries)
    # Candidates without a prompt share one embedding, the query itself.
    plain = (candidates & (index.prompt_tasks < 0)).int()  # [B, T]
    rows = plain.any(dim=1).nonzero()[:, 0]
    best.update(rows, plain[rows].argmax(dim=1), queries[rows])
    for pairs in _kth_pair_per_image(images):
        best.update(images[pairs], tasks[pairs], embeddings[pairs])
    passes = 1 + torch.bincount(images, minlength=count)
    return Matches(best.scores, candidates, best.tasks, best.embeddings, passes)


def retrieve(index: PrototypeIndex, queries: Tensor, neighbours: int) -> Tensor:
    """Step 1: bool [B, T], the tasks of the r key prototypes most similar to each query [B, D]."""
    similarity = F.normalize(queries, dim=1) @ index.keys.T  # [B, K]
    nearest = similarity.topk(min(neighbours, len(index.keys)), dim=1).indices  # [B, r]
    candidates = torch.zeros(len(queries), len(index.prompt_tasks), dtype=torch.bool)
    return candidates.scatter_(1, index.key_tasks[nearest], True)


def class_scores(index: PrototypeIndex, embeddings: Tensor) -> Tensor:
    """Step 3: [B, C], the greatest cosine of each embedding [B, D] to a value prototype of each class."""
    similarity = F.normalize(embeddings, dim=1) @ index.values.T  # [B, V]
    scores = torch.full((len(embeddings), index.num_classes), -torch.inf)
    return scores.scatter_reduce_(1, index.value_classes.expand(len(embeddings), -1), similarity, "amax")


def _prompted_pairs(index: PrototypeIndex, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Images [m], ascending, and the tasks [m] whose prompts to run on them; tasks that share one run it once."""
    images, tasks = candidates.nonzero().T
    owners = index.prompt_tasks[tasks]
    pairs = torch.zeros_like(candidates)
    pairs[images[owners >= 0], owners[owners >= 0]] = True
    images, tasks = pairs.nonzero().T
    return images, tasks


def _kth_pair_per_image(images: Tensor) -> Iterator[Tensor]:
    """Positions in `images` [m], ascending: first the first pair of each image, then the second, and so on.

    So that no more than one score per image and class is in memory at a time.
    """
    k = torch.arange(len(images)) - torch.searchsorted(images, images)
    for number in range(int(k.max()) + 1 if len(k) else 0):
        yield (k == number).nonzero()[:, 0]


class _BestMatch:
    """Per image the best score of each class so far, and the task and embedding behind the best of all."""

    def __init__(self, index: PrototypeIndex, queries: Tensor):
        self.index = index
        self.scores = torch.full((len(queries), index.num_classes), -torch.inf)
        self.tasks = torch.zeros(len(queries), dtype=torch.long)
        self.embeddings = queries.clone()

    def update(self, images: Tensor, tasks: Tensor, embeddings: Tensor) -> None:
        """Take in different images [m], each embedded [m, D] under the prompt of a task [m]."""
        if not len(images):
            return
        new, old = class_scores(self.index, embeddings), self.scores[images]  # [m, C]
        won = new.amax(dim=1) > old.amax(dim=1)
        self.tasks[images[won]] = tasks[won]
        self.embeddings[images[won]] = embeddings[won]
        self.scores[images] = torch.maximum(new, old)
