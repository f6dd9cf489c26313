"""Learn single images from what the user says of predictions: correct a wrong one, confirm a right one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protosteer.data.image_files import image_bytes, image_exists
from protosteer.data.images import ImageSet, as_images
from protosteer.errors import DataError
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord, correction_name
from protosteer.tasks import learn_class
from protosteer.util.files import digest

if TYPE_CHECKING:
    from protosteer.learner import Learner

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64)  # images that a correction may count as


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """What identifies an image: its file's bytes, and the name that the log has of it."""

    content: bytes
    name: str | None = None

    @classmethod
    def of(cls, image: Any, images: ImageSet) -> ImageFile:
        """Find the file of an image if it is a path; else its pixels stand for it."""
        path = Path(image) if isinstance(image, (str, os.PathLike)) else None
        if path is not None and image_exists(path):
            return cls(image_bytes(path), path.name)
        return cls(images.pixels([0]).numpy().tobytes())


def correct(learner: Learner, image: Any, name: str, file: ImageFile | None = None) -> TaskRecord:
    """Learn one image as class `name`, with the least weight that changes the label; see `Learner.correct`."""
    images = as_images(image, learner.backbone.preprocessing)
    if len(images) != 1:
        message = f"{len(images)} images cannot be one correction; correct them one by one"
        raise DataError(message, code="not-one-image")
    before = learner.predict(images).labels[0]
    others, record = _learn(learner, images, name, file or ImageFile.of(image, images), before)
    trial = learner.copy()
    for weight in _WEIGHTS:
        weighted = dataclasses.replace(record, classes=record.classes.with_image_weight(weight))
        trial.memory = Memory([*others.tasks, weighted])
        if trial.predict(images).labels == [name]:
            break
    learner.memory = trial.memory
    return learner.memory.tasks[-1]


def confirm(learner: Learner, images: Sequence[Any], files: Sequence[ImageFile] | None = None) -> list[TaskRecord]:
    """Learn images, each as the class that is predicted for it; see `Learner.confirm`."""
    labels = [learner.predict(image).labels[0] for image in images]
    records, trial = list[TaskRecord](), learner.copy()
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        single = as_images(image, learner.backbone.preprocessing)
        others, record = _learn(trial, single, label, files[row] if files else ImageFile.of(image, single), label)
        records.append(dataclasses.replace(record, confirmed=True))
        trial.memory = Memory([*others.tasks, records[-1]])
    learner.memory = trial.memory
    return records


def _learn(learner: Learner, images: ImageSet, name: str, file: ImageFile, before: str) -> tuple[Memory, TaskRecord]:
    """The memory without what was said of the same image before, and the new record."""
    number = digest(file.content)
    task = correction_name(number)
    others = Memory(old for old in learner.memory.tasks if old.name != task)
    record = learn_class(name, learner.task_images(images, name), others, learner.settings)
    record = record.computed_in(learner.backbone.precision)
    return others, dataclasses.replace(
        record,
        name=task,
        classes=record.classes.with_rows("seen", [torch.tensor([number])]),
        metadata=dataclasses.replace(
            record.metadata, file=file.name, image_bytes=None if file.name is None else len(file.content)
        ),
        corrected_from=before,
    )
