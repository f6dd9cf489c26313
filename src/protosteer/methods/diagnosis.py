"""Why the answers to one task's test images are what they are, by the rule that gave them.

Figures are in percent of the images unless said otherwise. `accuracy` and the kinds of errors after it add up
to 100.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.classifier import SURE, Fusion
from protosteer.model.index import Index
from protosteer.model.records import TaskRecord
from protosteer.paper.inference import match
from protosteer.paper.prompts import Embed

Figures = dict[str, float]


def of_classes(predicted: Tensor, truth: Tensor, own: Tensor) -> Figures:
    """From classes [B] alone. own: the classes of the images' task."""
    wrong, inside = predicted != truth, torch.isin(predicted, own)
    return {
        "accuracy": _percent(~wrong),
        "same_task": _percent(wrong & inside),  # taken for another class of their task
        "other_task": _percent(wrong & ~inside),
    }


def of_paper(
    index: Index, record: TaskRecord, j: int, embed: Embed, truth: Tensor, own: Tensor, neighbours: int
) -> Figures:
    """By retrieval and matching, of images of task j, whose record is given. own: the task's own classes.

    Tasks that brought images of an image's class are its tasks; where classes come once, that is j alone.
    """
    matches = match(index.prototypes, embed, len(truth), neighbours)
    wrong = matches.scores.argmax(dim=1) != truth
    taught = _taught(index)[truth]  # [B, T]
    retrieved = (matches.candidates & taught).any(dim=1)
    # Without prompts there is one embedding, and no match can be another prompt's.
    right_prompt = taught.gather(1, matches.winners[:, None])[:, 0]
    right_prompt |= ~(taught & index.prompted).any(dim=1)

    every = torch.arange(len(truth))
    names = [index.classes[c] for c in own.tolist()]
    mine = {c.name: c for c in record.classes}
    place = (own == truth[:, None]).int().argmax(dim=1)
    plain = embed(every, None)
    prompted = plain if record.prompt is None else embed(every, torch.full_like(every, j))
    with_prompt = _nearest(prompted, [mine[name].values.means for name in names]) == place
    without = _nearest(plain, [mine[name].keys for name in names]) == place
    return {
        "accuracy": _percent(~wrong),
        "not_retrieved": _percent(wrong & ~retrieved),
        "wrong_prompt_won": _percent(wrong & retrieved & ~right_prompt),  # another one made the best match
        "wrong_class": _percent(wrong & retrieved & right_prompt),
        # Among the task's own classes: did the prompt help?
        "true_task_with_prompt": _percent(with_prompt),
        "true_task_without_prompt": _percent(without),
        # Mean cosine of the task's training embeddings to their common mean.
        "key_spread": math.nan if record.metadata.key_spread is None else record.metadata.key_spread,
        "value_spread": math.nan if record.metadata.value_spread is None else record.metadata.value_spread,
    }


def of_evidence(fusion: Fusion, embed: Embed, truth: Tensor, own: Tensor) -> Figures:
    """By evidence, of images of one task. own: its classes.

    An error is fine evidence's if a prompt of a task that brought the image's class was tried. If not, the image was
    unsure and there is such a prompt, which was not tried, or coarse evidence was wrong and there was nothing to
    correct it.
    """
    coarse = fusion.match(embed, len(truth), fine=False)
    matches = fusion.match(embed, len(truth))
    wrong = matches.scores.argmax(dim=1) != truth
    sure = coarse.scores.softmax(dim=1).amax(dim=1) >= SURE
    index = fusion.index
    taught = _taught(index)[truth]  # [B, T]
    tried = (matches.candidates & taught).any(dim=1)
    to_try = tried | ((taught & index.prompted).any(dim=1) & ~sure)
    others = torch.ones(len(index.classes), dtype=torch.bool).index_fill_(0, own, False)
    inside = matches.scores.masked_fill(others, -torch.inf).argmax(dim=1)
    return {
        "accuracy": _percent(~wrong),
        "task_not_tried": _percent(wrong & to_try & ~tried),
        "coarse_wrong": _percent(wrong & ~to_try),  # sure, or of a task without a prompt
        "fine_wrong": _percent(wrong & tried),
        "coarse_accuracy": _percent(
            coarse.scores.argmax(dim=1) == truth
        ),  # had no task's own prompt been tried
        "true_task_accuracy": _percent(inside == truth),  # among the task's own classes, by the same scores
        "confidence": 100.0 * float(matches.scores.softmax(dim=1).amax(dim=1).double().mean()),
        "passes": float(matches.passes.double().mean()),  # per image
    }


def _taught(index: Index) -> Tensor:
    """bool [C, T]: which tasks have a record of each class."""
    taught = torch.zeros(len(index.classes), len(index.prompted), dtype=torch.bool)
    taught[index.record_classes, index.record_tasks] = True
    return taught


def _percent(mask: Tensor) -> float:
    return 100.0 * int(mask.sum()) / len(mask)


def _nearest(embeddings: Tensor, groups: list[Tensor]) -> Tensor:
    """Number of the group that holds the centroid most similar to each embedding."""
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups]))
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(torch.cat(groups), dim=1).T
    return owners[similarity.argmax(dim=1)]
