"""Why the answers to one task's test images are what they are, by the rule that gave them.

Figures are in percent of the images unless said otherwise. `accuracy` and the kinds of errors after it add up
to 100.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.method.fusion import SURE, Fusion
from protosteer.method.inference import Embed, Index, match
from protosteer.method.records import TaskRecord

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
    index: Index, record: TaskRecord, j: int, embed: Embed, truth: Tensor, neighbours: int
) -> Figures:
    """By retrieval and matching, of images of task j, whose record is given."""
    matches = match(index, embed, len(truth), neighbours)
    wrong = matches.scores.argmax(dim=1) != truth
    retrieved = matches.candidates[:, j]
    # Without prompts there is one embedding, and no match can be another prompt's.
    right_prompt = (matches.winners == j) | ~index.prompted[j]

    every = torch.arange(len(truth))
    own = _among(index, record, truth)
    plain = embed(every, None)
    prompted = plain if record.prompt is None else embed(every, torch.full_like(every, j))
    with_prompt = _nearest(prompted, [c.values.means for c in record.classes]) == own
    without = _nearest(plain, [c.keys for c in record.classes]) == own
    return {
        "accuracy": _percent(~wrong),
        "not_retrieved": _percent(wrong & ~retrieved),
        "wrong_prompt_won": _percent(wrong & retrieved & ~right_prompt),  # another one made the best match
        "wrong_class": _percent(wrong & retrieved & right_prompt),
        # Among the task's own classes: did the prompt help?
        "true_task_with_prompt": _percent(with_prompt),
        "true_task_without_prompt": _percent(without),
        # Mean cosine of the task's training embeddings to their common mean.
        "key_spread": math.nan if record.about.key_spread is None else record.about.key_spread,
        "value_spread": math.nan if record.about.value_spread is None else record.about.value_spread,
    }


def of_evidence(fusion: Fusion, j: int, embed: Embed, truth: Tensor) -> Figures:
    """By evidence, of images of task j.

    An error is fine evidence's if the task's own prompt was tried. If not, the image was unsure and the task has
    a prompt that was not tried, or coarse evidence was wrong and there was nothing to correct it.
    """
    coarse = fusion.match(embed, len(truth), fine=False)
    matches = fusion.match(embed, len(truth))
    wrong = matches.scores.argmax(dim=1) != truth
    sure = coarse.scores.softmax(dim=1).amax(dim=1) >= SURE
    tried = matches.candidates[:, j]
    to_try = tried | (fusion.index.prompted[j] & ~sure)
    index = fusion.index
    own = index.record_classes[index.record_tasks == j]
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


def _among(index: Index, record: TaskRecord, truth: Tensor) -> Tensor:
    """Classes [B] of the index as places among those of a task that has them."""
    places = {name: i for i, name in enumerate(record.class_names)}
    return torch.tensor([places[index.classes[c]] for c in truth.tolist()])


def _percent(mask: Tensor) -> float:
    return 100.0 * int(mask.sum()) / len(mask)


def _nearest(embeddings: Tensor, groups: list[Tensor]) -> Tensor:
    """Number of the group that holds the centroid most similar to each embedding."""
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups]))
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(torch.cat(groups), dim=1).T
    return owners[similarity.argmax(dim=1)]
