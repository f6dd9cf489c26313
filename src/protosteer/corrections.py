"""Correct one misclassified image without training."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protosteer.data.image_files import image_bytes, image_exists
from protosteer.data.images import as_images
from protosteer.errors import DataError
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord, correction_name
from protosteer.tasks import learn_class
from protosteer.util.files import digest

if TYPE_CHECKING:
    from protosteer.learner import Learner

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64)  # images that a correction may count as


def correct(learner: Learner, image: Any, name: str, content: bytes | None = None) -> TaskRecord:
    """Learn one image as class `name`, with the least weight that changes the label; see `Learner.correct`."""
    images = as_images(image, learner.backbone.preprocessing)
    if len(images) != 1:
        message = f"{len(images)} images cannot be one correction; correct them one by one"
        raise DataError(message, code="not-one-image")
    file = Path(image) if isinstance(image, (str, os.PathLike)) and image_exists(Path(image)) else None
    number = digest(content or (image_bytes(file) if file else images.pixels([0]).numpy().tobytes()))
    task = correction_name(number)
    before = Memory(old for old in learner.memory.tasks if old.name != task)
    record = learn_class(name, learner.task_images(images, name), before, learner.settings)
    record = dataclasses.replace(
        record,
        name=task,
        classes=record.classes.with_rows("seen", [torch.tensor([number])]),
        metadata=dataclasses.replace(record.metadata, file=file.name if file else None),
        corrected_from=learner.predict(images).labels[0],
    )
    trial = learner.copy()
    for weight in _WEIGHTS:
        weighted = dataclasses.replace(record, classes=record.classes.with_image_weight(weight))
        trial.memory = Memory([*before.tasks, weighted])
        if trial.predict(images).labels == [name]:
            break
    learner.memory = trial.memory
    return learner.memory.tasks[-1]
