"""Records of a class in one task, and of a task. No record refers to another task's numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.paper.prototypes import Centroids

if TYPE_CHECKING:
    from protosteer.model.class_table import ClassTable

SELECTIONS = ("learned", "corrected", "confirmed")


@dataclass(frozen=True, eq=False)
class ClassRecord:
    """One class in one task: a row of a `ClassTable`.

    Attributes:
        name: Name of the class.
        keys: Key prototypes [c, D] without a prompt, not normalised; with a summary, those of `plain`.
        values: Value prototypes under the task's prompt, not normalised.
        heldout_similarities: [h], of images that were not learned; see workflows/ood.py.
        plain: Summary without a prompt, for the default classifier.
        shared: Summary under the shared prompt, for the default classifier.
        file_digests: int64 [s], of the files that were learned or held out.
    """

    name: str
    keys: Tensor
    values: Centroids
    heldout_similarities: Tensor | None = None
    plain: ClassSummary | None = None
    shared: ClassSummary | None = None
    file_digests: Tensor | None = None

    @property
    def images(self) -> int:
        """How many images it was learned from."""
        return int(self.values.counts.sum())


@dataclass(frozen=True)
class TaskMetadata:
    """Provenance of a task; no prediction depends on it. Unknown values are None."""

    settings: Mapping[str, Any] | None = None
    images: int | None = None  # that were learned
    key_spread: float | None = None  # mean cosine of the embeddings to their common mean
    value_spread: float | None = None
    loss: float | None = None  # of the last epoch
    accuracy: float | None = None  # percent of its images nearest to their own class mean
    trained_parameters: int | None = None
    learned: str | None = None  # date, ISO
    image_bytes: int | None = None  # of the files that were learned
    held_out: int | None = None  # images that were not learned but checked the result
    file: str | None = None  # the name of the only one that was learned
    unfinished: bool | None = None  # can be used, but its prompt was still to be trained
    precision: str | None = None  # of its features; None is fp32

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file, without unknown values."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TaskMetadata:
        """Build it from the header of a file, whose fields were checked; others are of a later version."""
        return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if values.get(f.name) is not None})


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """Everything stored of one task. `prompt` is None if nothing was trained."""

    name: str
    classes: ClassTable
    prompt: Tensor | None
    independent: bool = False  # its prompt was trained without other tasks, or there is none
    metadata: TaskMetadata = TaskMetadata()
    few_shot: bool = False  # nothing was trained: the prompt, if any, is a copy of the nearest task's
    shared_prompt: Tensor | None = None  # under which its `shared` summaries were made
    corrected_from: str | None = None  # the label that was predicted before the correction
    confirmed: bool = False  # its images were learned because they had been classified correctly
    compacted: bool = False  # many corrections, or many confirmations, in one

    @property
    def class_names(self) -> list[str]:
        """Return the names of its classes, in order."""
        return list(self.classes.names)

    @property
    def selection(self) -> str:
        """Return how its images were chosen, one of `SELECTIONS`: all, misclassified or correctly classified ones."""
        corrected = self.compacted or self.corrected_from is not None
        return SELECTIONS[2 if self.confirmed else int(corrected)]

    @property
    def images(self) -> int:
        """Return how many images its classes were learned from."""
        return int(self.classes.images.sum())

    @property
    def prompt_is_shared(self) -> bool:
        """Return whether its prompt serves all classes of the model."""
        return equal_prompts(self.prompt, self.shared_prompt)

    def computed_in(self, precision: str) -> TaskRecord:
        """Return a copy that states the precision of its features."""
        stated = None if precision == "fp32" else precision
        return dataclasses.replace(self, metadata=dataclasses.replace(self.metadata, precision=stated))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors as a file keeps them, with unique names, but for the shared prompt."""
        if self.prompt is not None:
            yield "prompt", self.prompt
        for name, column in self.classes.packed().items():
            yield f"classes.{name}", column

    @property
    def bytes(self) -> int:
        """Return the bytes of its tensors in a file."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors())


def equal_prompts(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether both are prompts and equal."""
    return a is not None and b is not None and torch.equal(a, b)


def correction_name(digest: int) -> str:
    """Return the name of the task that corrects the image with this digest."""
    return f"correction-{digest % 2**64:016x}"
