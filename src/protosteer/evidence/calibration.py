"""Weights of the views, from images that were learned: what the evidence would be, had each been left out.

Never are all classes needed at once. Beyond `WEIGHED` of them they are swept block by block, and of each image those
stay that are likeliest, and an even spread of the others, which stands for all others in a sum over classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.evidence.class_statistics import places
from protosteer.evidence.scorer import Coarse

UNCALIBRATED = 10.0  # the weight where no image can be left out
WEIGHED = 20_000  # classes, up to which each of them counts; of more ...
NEAR, SPREAD = 256, 4_096  # ... the likeliest of each image, and others
_BLOCK = 4_096  # classes that are scored at once


@dataclass(frozen=True)
class LeftOut:
    """What k views say of m images, of n columns: all classes, or as many as stand for them."""

    evidence: Tensor  # [m, n, k]
    many: Tensor  # [m, n]: for how many classes a column stands, as a logarithm
    own: Tensor  # [m, k]: evidence for the true class, ...
    usual: Tensor  # [m, k]: ... and for a class on average
    similar: Tensor  # [m, k]: greatest similarity to a class

    @classmethod
    def of(cls, views: Sequence[Coarse]) -> LeftOut:
        """The views leave out the same images."""
        space = views[0].space
        labels = space.owners[space.left_out]
        if len(space.means) > WEIGHED:
            return _swept(views, labels)
        evidence, similarities = (torch.stack(part, dim=-1) for part in _seen(views, space.classes))
        return cls.among_all(evidence, similarities, labels)

    @classmethod
    def among_all(cls, evidence: Tensor, similarities: Tensor, labels: Tensor) -> LeftOut:
        """Of evidence and similarities [m, C, k], and the true classes [m]."""
        own = evidence[torch.arange(len(labels)), labels]
        many = evidence.new_zeros(evidence.shape[:2])
        return cls(evidence, many, own, evidence.mean(dim=1), similarities.amax(dim=1))

    def weights(self, views: Sequence[int], images: Tensor | slice = slice(None)) -> list[float]:
        """One weight for each of some views together: those under which the true classes of images are likeliest.

        Never negative. That nothing among m images went wrong does not mean that nothing ever will: the m + 1st
        counts as one that says nothing, which bounds how sure a model can be.
        """
        kinds, many = torch.tensor(views), self.many[images]
        evidence, own, usual = (x[images][..., kinds] for x in (self.evidence, self.own, self.usual))
        if not len(own):
            return [UNCALIBRATED / len(views)] * len(views)
        logs = torch.full((len(views),), math.log(UNCALIBRATED / len(views)), dtype=torch.double)
        logs.requires_grad_()
        optimiser = torch.optim.LBFGS([logs], max_iter=50, line_search_fn="strong_wolfe")
        smoothing = 1 / (len(own) + 1)
        target = (1 - smoothing) * own + smoothing * usual

        def loss() -> Tensor:
            optimiser.zero_grad()
            total = (evidence @ logs.exp() + many).logsumexp(dim=1)
            entropy = (total - target @ logs.exp()).mean()
            entropy.backward()
            return entropy

        optimiser.step(loss)
        return logs.detach().exp().tolist()


def _seen(views: Sequence[Coarse], classes: slice) -> tuple[list[Tensor], list[Tensor]]:
    parts = [view.left_out(classes) for view in views]
    return [evidence for evidence, _ in parts], [similarities for _, similarities in parts]


def _swept(views: Sequence[Coarse], labels: Tensor) -> LeftOut:
    """From blocks of classes one after the other."""
    count, classes, kinds = len(labels), len(views[0].space.means), len(views)
    spread = torch.linspace(0, classes - 1, SPREAD).round().long()
    near = torch.empty(count, 0, kinds, dtype=torch.double)  # the likeliest so far, and which they are
    numbers = torch.empty(count, 0, dtype=torch.int64)
    own, total = torch.empty(count, kinds).double(), torch.zeros(count, kinds).double()
    similar = torch.full((count, kinds), -torch.inf, dtype=torch.double)
    others = []
    for first in range(0, classes, _BLOCK):
        block = slice(first, min(first + _BLOCK, classes))
        evidence, similarities = (torch.stack(part, dim=-1) for part in _seen(views, block))
        images, columns = places(labels, block)
        own[images] = evidence[images, columns]
        total += evidence.sum(dim=1)
        similar = torch.maximum(similar, similarities.amax(dim=1))
        others.append(evidence[:, spread[(spread >= first) & (spread < block.stop)] - first])
        near, numbers = _likeliest(near, numbers, evidence, first)
    spots = torch.searchsorted(spread, numbers).clamp(max=SPREAD - 1)
    spots = spots.where(spread[spots] == numbers, SPREAD)  # its end for what is not in the spread
    taken = torch.zeros(count, SPREAD + 1, dtype=torch.bool).scatter_(1, spots, True)[:, :-1]
    many = ((classes - NEAR) / (~taken).sum(dim=1, keepdim=True).double()).log().expand_as(taken)
    offsets = torch.cat([many.new_zeros(count, NEAR), many.masked_fill(taken, -torch.inf)], dim=1)
    return LeftOut(torch.cat([near, *others], dim=1), offsets, own, total / classes, similar)


def _likeliest(near: Tensor, numbers: Tensor, evidence: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Of those so far and a block [m, c, k] of classes from `first` on."""
    here = torch.arange(first, first + evidence.shape[1]).expand(len(evidence), -1)
    near, numbers = torch.cat([near, evidence], dim=1), torch.cat([numbers, here], dim=1)
    best = near.sum(dim=2).topk(min(NEAR, near.shape[1]), dim=1).indices
    return near.gather(1, best[:, :, None].expand(-1, -1, near.shape[2])), numbers.gather(1, best)
