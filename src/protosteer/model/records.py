"""What is kept of a class in one task, and of a task, as data. No record refers to another task's numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.paper.prototypes import Centroids

if TYPE_CHECKING:
    from protosteer.model.class_table import ClassTable


@dataclass(frozen=True, eq=False)
class ClassRecord:
    """A class in one task: key centroids (no prompt) and value centroids (its task's prompt), raw, not
    normalised.

    A class that is read as evidence (`evidence.py`) has sketches too; the points of the plain one are its
    keys.
    """

    name: str
    keys: Tensor  # [c, D]
    values: Centroids
    heldout_similarities: Tensor | None = None  # [h]: of images that were not learned; see workflows/ood.py
    plain: ClassSummary | None = None  # no prompt
    shared: ClassSummary | None = None  # under the shared prompt
    file_digests: Tensor | None = None  # int64 [s]: of files that were learned or held out

    @property
    def images(self) -> int:
        return int(self.values.counts.sum())


@dataclass(frozen=True)
class TaskMetadata:
    """Where a task's record comes from. No prediction depends on it; what is not known is None."""

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

    def to_dict(self) -> dict[str, Any]:
        """For files: plain data, without what is not known."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TaskMetadata:
        """Build it from the header of a file, whose fields were checked; others are of a later version."""
        return cls(
            **{f.name: values[f.name] for f in dataclasses.fields(cls) if values.get(f.name) is not None}
        )


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """Everything kept of one task. `prompt` is None for the training-free baseline."""

    name: str
    classes: ClassTable
    prompt: Tensor | None
    independent: bool = False  # no other task had a say in training its prompt, or there is none
    metadata: TaskMetadata = TaskMetadata()
    few_shot: bool = False  # nothing was trained: the prompt, if any, is a copy of the nearest task's
    shared_prompt: Tensor | None = None  # under which its `shared` summaries were made
    corrected_from: str | None = None  # the label that was predicted before the correction

    @property
    def class_names(self) -> list[str]:
        """Return the names of its classes, in order."""
        return list(self.classes.names)

    @property
    def images(self) -> int:
        """Return how many images its classes were learned from."""
        return int(self.classes.images.sum())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors as a file keeps them, with unique names, but for the shared prompt."""
        if self.prompt is not None:
            yield "prompt", self.prompt
        for name, column in self.classes.packed().items():
            yield f"classes.{name}", column

    @property
    def bytes(self) -> int:
        """Return how much a file keeps of it."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors())


def correction_name(digest: int) -> str:
    """Of the task that is a correction of an image, by what tells the image from others."""
    return f"correction-{digest % 2**64:016x}"
