"""What is kept of a class in one task, and of a task, as data. No record refers to another task's numbers."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor

from protosteer.evidence.prototype_summary import ClassSummary, half_if_lossless
from protosteer.paper.prototypes import Centroids


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


class LazyClasses(Sequence[ClassRecord]):
    """Records that are made when one of them is looked at; their names are known before."""

    def __init__(self, names: Sequence[str]):
        self.names = names
        self._records: tuple[ClassRecord, ...] | None = None

    @property
    def made(self) -> bool:
        return self._records is not None

    @abstractmethod
    def make(self) -> tuple[ClassRecord, ...]: ...

    @property
    @abstractmethod
    def evidence(self) -> bool:
        """Whether all of them have a sketch without a prompt."""

    @overload
    def __getitem__(self, place: int) -> ClassRecord: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[ClassRecord, ...]: ...

    def __getitem__(self, place: int | slice) -> ClassRecord | tuple[ClassRecord, ...]:
        if self._records is None:
            self._records = self.make()
        return self._records[place]

    def __len__(self) -> int:
        return len(self.names)


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
        """From a file; what this version does not know is left out, what has another type is refused."""
        kinds = {
            "settings": dict,
            "learned": str,
            "images": int,
            "image_bytes": int,
            "held_out": int,
            "file": str,
        }
        kinds |= {"trained_parameters": int, "unfinished": bool}
        known = {f.name: values[f.name] for f in dataclasses.fields(cls) if values.get(f.name) is not None}
        for name, value in known.items():
            kind = kinds.get(name, (int, float))
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"task {name} is {value!r}")
        return cls(**known)


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """Everything kept of one task. `prompt` is None for the training-free baseline."""

    name: str
    classes: Sequence[ClassRecord]
    prompt: Tensor | None
    independent: bool = False  # no other task had a say in training its prompt, or there is none
    metadata: TaskMetadata = TaskMetadata()
    few_shot: bool = False  # nothing was trained: the prompt, if any, is a copy of the nearest task's
    shared_prompt: Tensor | None = None  # under which its `shared` summaries were made
    corrected_from: str | None = None  # the label that was predicted before the correction

    @property
    def class_names(self) -> list[str]:
        if isinstance(self.classes, LazyClasses):
            return list(self.classes.names)
        return [record.name for record in self.classes]

    @property
    def evidence(self) -> bool:
        """Whether each of its classes can be read as evidence."""
        if isinstance(self.classes, LazyClasses):
            return self.classes.evidence
        return all(record.plain is not None for record in self.classes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, packed, with names that are unique within the task, but for the shared prompt."""
        if self.prompt is not None:
            yield "prompt", self.prompt
        for i, record in enumerate(self.classes):
            parts = {"plain": record.plain, "domain": record.shared}
            if record.plain is None:
                yield f"classes.{i}.keys", record.keys
            for field, tensor in packed_centroids(record.values).items():
                yield f"classes.{i}.values.{field}", tensor
            for name, part in parts.items():
                for field, tensor in part.packed().items() if part is not None else ():
                    yield f"classes.{i}.{name}.{field}", tensor
            if record.heldout_similarities is not None:
                yield f"classes.{i}.held_out", record.heldout_similarities
            if record.file_digests is not None:
                yield f"classes.{i}.seen", record.file_digests

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors())


def packed_centroids(values: Centroids) -> dict[str, Tensor]:
    """Value prototypes for a file, in half precision where that is exact."""
    means, deviations = half_if_lossless(values.means), half_if_lossless(values.deviations)
    return {"means": means, "deviations": deviations, "counts": values.counts}


def correction_name(digest: int) -> str:
    """Of the task that is a correction of an image, by what tells the image from others."""
    return f"correction-{digest % 2**64:016x}"
