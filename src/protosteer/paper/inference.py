"""Prediction: coarse retrieval of candidate prompts by key centroids, fine matching of value centroids.

1. q = f(x); the r key centroids most similar to q name their tasks, the candidates.
2. q_j = f with prompt P^j, for each candidate j.
3. The class of the value centroid that is most similar to any q_j, over all classes learned.

Images are handled in batches: all pairs of an image and a candidate are embedded together, each under its own
prompt, so that the cost does not depend on how many tasks there are. Every row of the result depends on its
own image alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.model.class_table import centroids_of, key_lengths_of, keys_of, value_lengths_of
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.paper.encoder import Encoder
from protosteer.paper.vit import shared_layers

# Embeds some of the images at hand, by row [m], each under a prompt of the index, by number [m]; None: no
# prompt.
Embed = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Index:
    """All centroids as normalised matrices, which task or class each belongs to, and the prompts.

    Prompts have the numbers of their tasks; the one for all classes, if there is one, comes last.
    """

    tasks: list[str]
    classes: list[str]
    prompts: list[Tensor | None]  # [S, L, D] each
    prompted: Tensor  # bool [T]
    prompt_owners: Tensor  # [T]: the first task that has the same prompt
    record_classes: Tensor  # [R]: a class may have records in several tasks
    record_tasks: Tensor  # [R]
    records: tuple[TaskRecord, ...]  # that the centroids are taken from, when they are first asked for

    @classmethod
    def build(cls, memory: Memory) -> Index:
        tasks, domain = memory.tasks, memory.shared_prompt
        return cls(
            tasks=memory.task_names,
            classes=memory.classes,
            prompts=[*(task.prompt for task in tasks), *([] if domain is None else [domain])],
            prompted=torch.tensor([task.prompt is not None for task in tasks]),
            prompt_owners=_prompt_owners(tasks),
            record_classes=memory.record_classes,
            record_tasks=memory.record_tasks,
            records=tasks,
        )

    @cached_property
    def class_tasks(self) -> Tensor:
        """[C]: the task that each class was first learned in."""
        first = torch.full((len(self.classes),), len(self.tasks))
        return first.scatter_reduce_(0, self.record_classes, self.record_tasks, "amin")

    @cached_property
    def keys(self) -> Tensor:
        """[K, D]"""
        return F.normalize(keys_of(self.records), dim=1)

    @cached_property
    def key_tasks(self) -> Tensor:
        """[K]"""
        return self.record_tasks.repeat_interleave(key_lengths_of(self.records))

    @cached_property
    def values(self) -> Tensor:
        """[V, D]"""
        return F.normalize(centroids_of(self.records).means, dim=1)

    @cached_property
    def value_records(self) -> Tensor:
        """[V]: ascending"""
        return torch.arange(len(self.record_classes)).repeat_interleave(value_lengths_of(self.records))

    @cached_property
    def value_classes(self) -> Tensor:
        """[V]"""
        return self.record_classes[self.value_records]

    @cached_property
    def value_tasks(self) -> Tensor:
        """[V]: ascending"""
        return self.record_tasks[self.value_records]

    def shared_layers(self, depth: int) -> int:
        """Layers that no task's prompt touches: one run of them serves the query and every prompt."""
        return min((shared_layers(p, depth) for p in self.prompts if p is not None), default=0)


def _prompt_owners(tasks: Sequence[TaskRecord]) -> Tensor:
    """[T]: for each task the first that has the very same prompt, so that copies are not run twice."""
    owners = list(range(len(tasks)))
    if any(task.few_shot for task in tasks):
        first: dict[bytes, int] = {}
        for t, task in enumerate(tasks):
            if task.prompt is not None:
                content = str(list(task.prompt.shape)).encode() + task.prompt.contiguous().numpy().tobytes()
                owners[t] = first.setdefault(hashlib.sha256(content).digest(), t)
    return torch.tensor(owners)


def prompted_forward(encoder: Encoder, index: Index, tokens: Tensor, batch_size: int) -> Embed:
    """Embeds images whose tokens [N, T, D] have left the layers that no prompt touches."""
    layers = index.shared_layers(encoder.depth)

    def embed(rows: Tensor, tasks: Tensor | None) -> Tensor:
        embeddings = torch.empty(len(rows), encoder.dim)
        groups = [torch.arange(len(rows))] if tasks is None else _same_shape(index, tasks)
        for some in (part for group in groups for part in group.split(batch_size)):
            prompts = None
            if tasks is not None:
                prompts = torch.stack([index.prompts[t] for t in tasks[some].tolist()])
            with torch.no_grad():
                embeddings[some] = encoder.rest(tokens[rows[some]], layers, prompts).float().cpu()
        return embeddings

    return embed


def _same_shape(index: Index, tasks: Tensor) -> list[Tensor]:
    """Places in a list of tasks [m], grouped so that the prompts of a group can be stacked."""
    groups: dict[torch.Size, list[int]] = {}
    for t in tasks.unique().tolist():
        prompt = index.prompts[t]
        assert prompt is not None
        groups.setdefault(prompt.shape, []).append(t)
    return [torch.isin(tasks, torch.tensor(group)).nonzero()[:, 0] for group in groups.values()]


@dataclass(frozen=True)
class Matches:
    """Outcome for B images, in numbers."""

    scores: Tensor  # [B, C], or of some classes [B, n]: the greatest wins
    similarities: Tensor  # [B, C]: as cosines, for people and for telling unknown images
    candidates: Tensor  # bool [B, T]: the tasks that were taken into consideration
    winners: Tensor  # [B]: the task under whose prompt the best match was made; of copies the first
    embeddings: Tensor  # [B, D]: the image as that prompt makes it seen
    passes: Tensor  # int64 [B]: forward passes that each image took
    columns: Tensor | None = (
        None  # [B, n]: the classes that were scored, as numbers; None: all, in their order
    )
    rest: Tensor | None = None  # [B]: one score for all others together, where scores are logits

    @classmethod
    def join(cls, parts: Sequence[Matches]) -> Matches:
        known = [name for name, column in vars(parts[0]).items() if column is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in known})


def match(index: Index, embed: Embed, count: int, neighbours: int) -> Matches:
    """Steps 1 to 3 for `count` images that `embed` knows by their rows.

    A score is the best cosine over a class's centroids and all q_j.
    """
    queries = embed(torch.arange(count), None)
    candidates = retrieve(index, queries, neighbours)  # [B, T]
    images, tasks = _pairs(index, candidates)  # [m], [m]
    embeddings = embed(images, tasks) if len(images) else queries[:0]  # [m, D]

    best = _Best(index, queries)
    # Candidates without a prompt share one embedding, the query itself.
    plain = (candidates & ~index.prompted).int()
    some = plain.any(dim=1).nonzero()[:, 0]
    best.offer(some, plain[some].argmax(dim=1), queries[some])
    for some in _rounds(images):
        best.offer(images[some], tasks[some], embeddings[some])
    passes = 1 + torch.bincount(images, minlength=count)
    return best.matches(candidates, passes)


def _pairs(index: Index, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Images [m] and the tasks [m] whose prompts to try on them, in this order; no prompt twice."""
    tried = torch.zeros_like(candidates)
    rows, tasks = (candidates & index.prompted).nonzero().T
    tried[rows, index.prompt_owners[tasks]] = True
    rows, tasks = tried.nonzero().T
    return rows, tasks


def _rounds(images: Tensor) -> Iterator[Tensor]:
    """Pairs [m], ascending by image, in rounds: the first pair of every image, then the second of those that
    have one.

    So that no more than one score per image and class is in memory at a time.
    """
    place = torch.arange(len(images)) - torch.searchsorted(images, images)
    for number in range(int(place.max()) + 1 if len(place) else 0):
        yield (place == number).nonzero()[:, 0]


class _Best:
    """Of every image the best score of each class, and the task and embedding behind the best match so far."""

    def __init__(self, index: Index, queries: Tensor):
        self.index = index
        self.tasks = torch.zeros(len(queries), dtype=torch.long)
        self.embeddings = queries.clone()
        self.scores = torch.full((len(queries), len(index.classes)), -torch.inf)

    def offer(self, images: Tensor, tasks: Tensor, embeddings: Tensor) -> None:
        """Different images [m], each embedded [m, D] under the prompt of a task [m]."""
        if not len(images):
            return
        new, old = class_scores(self.index, embeddings), self.scores[images]
        won = new.amax(dim=1) > old.amax(dim=1)
        self.tasks[images[won]] = tasks[won]
        self.embeddings[images[won]] = embeddings[won]
        self.scores[images] = torch.maximum(new, old)

    def matches(self, candidates: Tensor, passes: Tensor) -> Matches:
        return Matches(self.scores, self.scores, candidates, self.tasks, self.embeddings, passes)


def retrieve(index: Index, queries: Tensor, neighbours: int) -> Tensor:
    """bool [B, T]: tasks of the r key centroids that are most similar to each query."""
    similarity = F.normalize(queries, dim=1) @ index.keys.T
    nearest = similarity.topk(min(neighbours, len(index.keys)), dim=1).indices
    candidates = torch.zeros(len(queries), len(index.tasks), dtype=torch.bool)
    return candidates.scatter_(1, index.key_tasks[nearest], True)


def nearest_task(index: Index, queries: Tensor) -> int:
    """The task to whose keys these images are most similar, on average over the images."""
    similarity = F.normalize(queries, dim=1) @ index.keys.T
    empty = torch.full((len(queries), len(index.tasks)), -torch.inf)
    per_task = empty.scatter_reduce_(1, index.key_tasks.expand(len(queries), -1), similarity, "amax")
    return int(per_task.mean(dim=0).argmax())


def class_scores(index: Index, embeddings: Tensor) -> Tensor:
    """[B, C]: greatest cosine similarity to any value centroid of each class."""
    similarity = F.normalize(embeddings, dim=1) @ index.values.T
    empty = torch.full((len(embeddings), len(index.classes)), -torch.inf)
    owners = index.value_classes.expand(len(embeddings), -1)
    return empty.scatter_reduce_(1, owners, similarity, "amax")
