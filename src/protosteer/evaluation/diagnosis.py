"""Why a run has the accuracy that it has: the end figure hides the cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.method.inference import Embed, Index, match
from protosteer.method.memory import Memory, TaskRecord
from protosteer.methods.base import Images, Method


@dataclass(frozen=True)
class TaskDiagnosis:
    """All in percent of the task's test images, at the end of the stream. The three error bins and
    `accuracy` add up to 100."""

    task: str
    accuracy: float
    true_task_with_prompt: float  # accuracy among the task's own classes, values and prompt
    true_task_without_prompt: float  # the same with keys and no prompt: did the prompt help?
    not_retrieved: float  # wrong, and the true task was not among the candidates
    wrong_prompt_won: float  # wrong, the true task was a candidate, but another prompt made the best match
    wrong_class: float  # wrong under the right prompt
    key_spread: float  # mean cosine of the task's training embeddings to their common mean
    value_spread: float


@dataclass(frozen=True)
class Diagnosis:
    tasks: list[TaskDiagnosis]

    def mean(self) -> dict[str, float]:
        """Means over tasks."""
        rows = [asdict(task) for task in self.tasks]
        return {key: sum(r[key] for r in rows) / len(rows) for key in rows[0] if key != "task"}


@runtime_checkable
class Diagnosable(Protocol):
    """A method whose decisions can be taken apart: it retrieves tasks by keys and matches values under their prompts."""

    @property
    def memory(self) -> Memory: ...
    @property
    def neighbours(self) -> int: ...
    def embedder(self, images: Images) -> Embed: ...


def diagnose(method: Method, tests: Sequence[tuple[Images, list[str]]]) -> Diagnosis | None:
    """Measure every task learned, given its test images and their labels; None for methods of other kinds."""
    if not isinstance(method, Diagnosable):
        return None
    index = Index.build(method.memory)
    return Diagnosis(
        [
            _task(index, record, j, method.embedder(images), labels, method.neighbours)
            for j, (record, (images, labels)) in enumerate(zip(method.memory.tasks, tests, strict=True))
        ]
    )


def _task(
    index: Index, record: TaskRecord, j: int, embed: Embed, labels: list[str], neighbours: int
) -> TaskDiagnosis:
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
    about = record.about

    def percent(mask: Tensor) -> float:
        return 100.0 * int(mask.sum()) / len(mask)

    return TaskDiagnosis(
        task=record.name,
        accuracy=percent(~wrong),
        true_task_with_prompt=percent(_nearest(prompted, [c.values.means for c in record.classes]) == own),
        true_task_without_prompt=percent(_nearest(plain, [c.keys for c in record.classes]) == own),
        not_retrieved=percent(wrong & ~retrieved),
        wrong_prompt_won=percent(wrong & retrieved & ~right_prompt),
        wrong_class=percent(wrong & retrieved & right_prompt),
        key_spread=math.nan if about.key_spread is None else about.key_spread,
        value_spread=math.nan if about.value_spread is None else about.value_spread,
    )


def _nearest(embeddings: Tensor, groups: list[Tensor]) -> Tensor:
    """Number of the group that holds the centroid most similar to each embedding."""
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups]))
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(torch.cat(groups), dim=1).T
    return owners[similarity.argmax(dim=1)]
