"""Labelled data sets: class names in order, a training split and a test split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from protosteer.data.images import ImageSet, Joined
from protosteer.errors import DataError


@dataclass(frozen=True)
class Labelled:
    """Images in file order, and their class numbers."""

    images: ImageSet
    labels: Tensor  # int64 [N]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            message = f"{len(self.images)} images but {len(self.labels)} labels; the files do not match"
            raise DataError(message, code="label-count")


@dataclass(frozen=True)
class Dataset:
    """A data set; `classes[k]` is the unique name of the class with label k."""

    name: str
    classes: list[str]
    train: Labelled
    test: Labelled
    checksums: Mapping[str, str] = field(default_factory=dict)  # "md5:..." or "sha256:..." by file

    def __post_init__(self) -> None:
        if len(set(self.classes)) != len(self.classes):
            repeated = sorted({name for name in self.classes if self.classes.count(name) > 1})
            message = f"{self.name}: class names {repeated} occur more than once; they must differ"
            raise DataError(message, code="duplicate-class")
        for kind, part in (("training", self.train), ("test", self.test)):
            labels = part.labels
            if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < len(self.classes)):
                raise DataError(
                    f"{self.name}: {kind} labels run from {int(labels.min())} to {int(labels.max())}, "
                    f"but there are {len(self.classes)} classes; get its files again",
                    code="label-out-of-range",
                )


def join(name: str, parts: Mapping[str, Dataset]) -> Dataset:
    """Join data sets into one, in the order given; a class is named `part/class`."""
    classes = [f"{key}/{label}" for key, part in parts.items() for label in part.classes]
    starts = torch.tensor([0, *(len(part.classes) for part in parts.values())]).cumsum(0).tolist()

    def join_split(splits: list[Labelled]) -> Labelled:
        labels = [part.labels + start for part, start in zip(splits, starts, strict=False)]
        return Labelled(Joined([part.images for part in splits]), torch.cat(labels))

    return Dataset(
        name,
        classes,
        join_split([part.train for part in parts.values()]),
        join_split([part.test for part in parts.values()]),
        {f"{key}/{file}": value for key, part in parts.items() for file, value in part.checksums.items()},
    )
