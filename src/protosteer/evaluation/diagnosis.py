"""Why a run has the accuracy that it has: the end figure hides the cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.method.inference import Embed, Index, match
from protosteer.method.memory import Memory, TaskRecord
from protosteer.methods.base import Images, Method


@runtime_checkable
class Diagnosable(Protocol):
    """A method that retrieves tasks by keys and matches values under their prompts."""

    @property
    def memory(self) -> Memory: ...
    @property
    def neighbours(self) -> int: ...
    def embedder(self, images: Images) -> Embed: ...


def diagnose(method: Method, tests: Sequence[tuple[Images, list[str]]]) -> dict[str, Any] | None:
    """Figures of every task learned and their mean over tasks, given each task's test images and their
    labels.

    All in percent of the task's test images. None for methods of other kinds.
    """
    if not isinstance(method, Diagnosable):
        return None
    index = Index.build(method.memory)
    tasks = [
        _task(index, record, j, method.embedder(images), labels, method.neighbours)
        for j, (record, (images, labels)) in enumerate(zip(method.memory.tasks, tests, strict=True))
    ]
    return {
        "mean": {name: sum(t[name] for t in tasks) / len(tasks) for name in tasks[0] if name != "task"},
        "tasks": tasks,
    }


def _task(
    index: Index, record: TaskRecord, j: int, embed: Embed, labels: list[str], neighbours: int
) -> dict[str, Any]:
    matches = match(index, embed, len(labels), neighbours)
    number = {name: i for i, name in enumerate(index.classes)}
    truth = torch.tensor([number[label] for label in labels])
    wrong = matches.scores.argmax(dim=1) != truth
    retrieved = matches.candidates[:, j]
    # Without prompts there is one embedding, and no match can be another prompt's.
    right_prompt = (matches.winners == j) | ~index.prompted[j]

    every = torch.arange(len(labels))
    own = torch.tensor([record.class_names.index(label) for label in labels])
    plain = embed(every, None)
    prompted = plain if record.prompt is None else embed(every, torch.full_like(every, j))

    def percent(mask: Tensor) -> float:
        return 100.0 * int(mask.sum()) / len(mask)

    with_prompt = _nearest(prompted, [c.values.means for c in record.classes]) == own
    without = _nearest(plain, [c.keys for c in record.classes]) == own
    return {
        "task": record.name,
        "accuracy": percent(~wrong),  # this and the three kinds of errors add up to 100
        # Among the task's own classes: did the prompt help?
        "true_task_with_prompt": percent(with_prompt),
        "true_task_without_prompt": percent(without),
        "not_retrieved": percent(wrong & ~retrieved),
        "wrong_prompt_won": percent(wrong & retrieved & ~right_prompt),  # another one made the best match
        "wrong_class": percent(wrong & retrieved & right_prompt),
        # Mean cosine of the task's training embeddings to their common mean.
        "key_spread": math.nan if record.about.key_spread is None else record.about.key_spread,
        "value_spread": math.nan if record.about.value_spread is None else record.about.value_spread,
    }


def _nearest(embeddings: Tensor, groups: list[Tensor]) -> Tensor:
    """Number of the group that holds the centroid most similar to each embedding."""
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups]))
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(torch.cat(groups), dim=1).T
    return owners[similarity.argmax(dim=1)]
