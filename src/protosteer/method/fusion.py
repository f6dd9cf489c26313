"""Prediction by evidence: coarse over all classes, fine inside the tasks that it leaves open.

1. An image is embedded in the best view of all classes, without a prompt or under the prompt for all classes,
   whichever tells images apart better that were left out. Coarse evidence makes a posterior of it. Whoever is
   sure then is done, after a single pass.
2. The others are seen in the second view, if that is worth its pass, ...
3. ... and those still open under the prompts of the tasks that the posterior leaves open. How similar the
   image is to a class's value centroids, each under its own task's prompt, is fine evidence for the class.

Weights of the views come from the images that can be left out of the records, so that probabilities mean what
they say; nothing is held out for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.method import evidence
from protosteer.method.evidence import Coarse
from protosteer.method.inference import Embed, Index, Matches
from protosteer.method.memory import ClassRecord, Memory
from protosteer.method.prototypes import Sketch
from protosteer.settings import Settings

SURE = 0.8  # the probability of a class from which on no further pass is made
OPEN = 0.1  # the probability of a task from which on its prompt is tried
MOST = 2  # passes after the first: in the second view, and under the prompts of the likeliest tasks
WORTH = 0.2  # the share of all weight from which on a second view is worth a pass
ENOUGH = 50  # images that the prompt for all classes was not trained with, to be judged by them alone
FINE = 0.5  # the weight of fine evidence, as a share of the weight of coarse evidence


@dataclass(frozen=True)
class View:
    """One space that all classes are known in."""

    prompt: int | None  # its number in the index
    coarse: Coarse
    weight: float  # together with the other views
    alone: float  # by itself
    familiar: Tensor  # [m]: greatest similarities of images that were left out


class Fusion:
    """What prediction by evidence needs of all records, computed once.

    Inside, classes stand in the order of their names, so that no bit depends on the order in which tasks were
    learned or merged.
    """

    def __init__(self, memory: Memory, index: Index):
        self.index = index
        self.order = torch.tensor(sorted(range(len(index.classes)), key=index.classes.__getitem__))
        self.places = self.order.argsort()  # where the classes of the memory stand inside
        self.class_tasks = index.class_tasks[self.order]
        records = memory.records
        self.views = _views(memory, [records[i] for i in self.order.tolist()], self.class_tasks)
        self.most = MOST - len(self.views[1:])  # own prompts that are tried
        self.domain = _trained_domain(memory)  # bool [T]
        # Value centroids stand task by task: where each begins.
        owners = index.class_tasks[index.value_classes]
        self.starts = torch.searchsorted(owners, torch.arange(len(index.tasks) + 1)).tolist()

    def match(self, embed: Embed, count: int, fine: bool = True) -> Matches:
        """Steps 1 to 3 for `count` images that `embed` knows by their rows; without `fine`, steps 1 and 2.

        Scores are logits.
        """
        first = self.views[0]
        seen = {first.prompt: embed(torch.arange(count), _number(first.prompt, count))}
        coarse, similarities = first.coarse.scores(seen[first.prompt])
        logits, passes = first.alone * coarse, torch.ones(count, dtype=torch.int64)
        for view in self.views[1:]:
            rows = _unsure(logits)
            seen[view.prompt] = torch.full_like(seen[first.prompt], torch.nan)
            if len(rows):
                seen[view.prompt][rows] = embed(rows, _number(view.prompt, len(rows)))
                other, _ = view.coarse.scores(seen[view.prompt][rows])
                logits[rows] = first.weight * coarse[rows] + view.weight * other
                passes[rows] += 1
        tried = self._open(logits) & fine
        images, tasks = tried.nonzero().T
        if len(images):
            similar, more = self._fine(embed, seen.get(len(self.index.tasks)), images, tasks, tried)
            logits += FINE * sum(view.weight for view in self.views) * similar
            passes += more
        winners = self.class_tasks[logits.argmax(dim=1)]
        scores, shown = self._in_order(logits), self._in_order(similarities)
        return Matches(scores, shown, tried, winners, seen[first.prompt], passes)

    def _in_order(self, columns: Tensor) -> Tensor:
        """[B, C]: as the memory has its classes."""
        turned = torch.empty_like(columns, dtype=torch.float32)
        turned[:, self.order] = columns.float()
        return turned

    def _open(self, logits: Tensor) -> Tensor:
        """bool [B, T]: the tasks whose own prompts are worth trying."""
        empty = logits.new_zeros(len(logits), len(self.index.tasks))
        tasks = self.class_tasks.expand(len(logits), -1)
        posterior = empty.scatter_add_(1, tasks, logits.softmax(dim=1))
        unsure = torch.zeros_like(posterior, dtype=torch.bool)
        unsure[_unsure(logits)] = True
        worth = posterior * (self.index.prompted & unsure & (posterior >= OPEN))
        leading = worth.topk(min(self.most, len(self.index.tasks)), dim=1).indices
        return torch.zeros_like(unsure).scatter_(1, leading, True) & (worth > 0)

    def _fine(
        self, embed: Embed, domain: Tensor | None, images: Tensor, tasks: Tensor, tried: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, C], greatest cosine to a class's value centroids under its task's prompt, and passes [B] for it.

        domain: images [B, D] under the prompt for all classes; the task that it comes from needs no other pass.
        What was not tried is neither helped nor hurt against the best of what was.
        """
        index = self.index
        known = self.domain[tasks] if domain is not None else torch.zeros_like(tasks, dtype=torch.bool)
        embeddings = torch.empty(len(images), index.values.shape[1])
        embeddings[~known] = embed(images[~known], tasks[~known])
        if domain is not None:
            embeddings[known] = domain[images[known]]
        fine = torch.full((len(tried), len(index.classes)), -torch.inf, dtype=torch.double)
        units = F.normalize(embeddings, dim=1)
        for t in tasks.unique().tolist():
            own, some = slice(self.starts[t], self.starts[t + 1]), tasks == t
            classes, owners = index.value_classes[own].unique(return_inverse=True)
            similarity = units[some] @ index.values[own].T
            best = torch.full((len(similarity), len(classes)), -torch.inf)
            best.scatter_reduce_(1, owners.expand(len(similarity), -1), similarity, "amax")
            fine[images[some][:, None], self.places[classes]] = best.double()
        usual = fine.amax(dim=1, keepdim=True).nan_to_num(neginf=0.0)
        return torch.where(fine.isinf(), usual, fine), torch.bincount(images[~known], minlength=len(tried))


def fusion_of(memory: Memory, settings: Settings, index: Index | None = None) -> Fusion | None:
    """None where the paper's rule is the one: by the settings, or because a class has no sketch."""
    if settings.rule == "paper" or not memory.evidence:
        return None
    return Fusion(memory, index or Index.build(memory))


def _views(memory: Memory, records: Sequence[ClassRecord], class_tasks: Tensor) -> list[View]:
    """The views of all classes, the one that weighs most first; those not worth a pass are left out."""
    coarse: dict[int | None, Coarse] = {None: Coarse([_known(record.plain) for record in records])}
    if memory.domain is not None:
        coarse[len(memory)] = Coarse([_known(record.domain) for record in records])
    space = coarse[None].space
    labels = space.owners[space.left_out]  # of the same images in every view
    left_out = {prompt: view.left_out() for prompt, view in coarse.items()}
    # To images that the prompt for all classes was trained with, it does more justice than to others.
    fair = ~_trained_domain(memory)[class_tasks[labels]]
    fair = fair if int(fair.sum()) >= ENOUGH else torch.ones_like(fair)

    def weights(prompts: list[int | None]) -> list[float]:
        return evidence.weights([left_out[p][0][fair] for p in prompts], labels[fair]).tolist()

    both = dict(zip(coarse, weights(list(coarse)), strict=True))
    worth = [p for p in coarse if both[p] >= WORTH * sum(both.values())]
    kept = sorted(worth, key=lambda p: -both[p])
    together = dict(zip(kept, weights(kept), strict=True))

    def familiar(prompt: int | None) -> Tensor:
        similarity = left_out[prompt][1].amax(dim=1)
        return similarity if prompt is None else similarity[fair]

    return [View(p, coarse[p], together[p], weights([p])[0], familiar(p)) for p in kept]


def _trained_domain(memory: Memory) -> Tensor:
    """bool [T]: the task, if it is there, whose own prompt is the one for all classes."""
    domain = memory.domain
    same = [
        domain is not None and t.prompt is not None and torch.equal(t.prompt, domain) for t in memory.tasks
    ]
    return torch.tensor(same)


def _known(sketch: Sketch | None) -> Sketch:
    assert sketch is not None
    return sketch


def _number(prompt: int | None, count: int) -> Tensor | None:
    return None if prompt is None else torch.full((count,), prompt)


def _unsure(logits: Tensor) -> Tensor:
    """Rows [m] whose likeliest class is not likely enough."""
    return (logits.softmax(dim=1).amax(dim=1) < SURE).nonzero()[:, 0]
