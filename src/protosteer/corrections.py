"""Learn single images from what the user says of predictions: correct a wrong one, confirm a right one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protosteer.data.image_files import image_bytes, image_exists
from protosteer.data.images import ImageSet, as_images
from protosteer.errors import DataError
from protosteer.model.compaction import compact
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord, correction_name
from protosteer.rules import Reader, reader_of
from protosteer.runtime.task_images import TaskImages
from protosteer.tasks import learn_class
from protosteer.util.files import digest

if TYPE_CHECKING:
    from protosteer.learner import Learner

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64)  # images that a correction may count as
# Least lead of the true class's logit: with it, the label stays the same when weights of scores are fitted again.
_MIN_LEAD = 0.05


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """What identifies an image: its file's bytes, and its file's name for the log."""

    content: bytes
    name: str | None = None

    @classmethod
    def of(cls, image: Any, images: ImageSet) -> ImageFile:
        """Read the file of an image if it is a path; else use its pixels as content."""
        path = Path(image) if isinstance(image, (str, os.PathLike)) else None
        if path is not None and image_exists(path):
            return cls(image_bytes(path), path.name)
        return cls(images.pixels([0]).numpy().tobytes())


@dataclasses.dataclass(frozen=True)
class Correction:
    """A correction that was made.

    Attributes:
        record: Its task record, as stored in the model.
        reader: A reader that includes it. A reader built from the memory also fits the weights of scores again.
        probabilities: [C], of the image by that reader.
    """

    record: TaskRecord
    reader: Reader
    probabilities: Tensor


def correct(learner: Learner, image: Any, name: str, file: ImageFile | None = None) -> Correction:
    """Learn one image as class `name`, with the least weight that changes the label; see `Learner.correct`.

    No reader is built from the memory: `Reader.with_image` updates one in closed form for each weight.
    """
    images = as_images(image, learner.backbone.preprocessing)
    if len(images) != 1:
        message = f"{len(images)} images cannot be one correction; correct them one by one"
        raise DataError(message, code="not-one-image")
    file, embedded = file or ImageFile.of(image, images), learner.task_images(images, name)
    reader = learner.reader
    label = reader.index.classes[int(_scores(reader, embedded).argmax())]
    memory = _without(learner.memory, file)
    if memory is not learner.memory:
        reader = reader_of(memory, learner.settings)
    record = _record(learner, memory, embedded, name, file, label)
    new_memory = memory.with_task(record)
    for weight in _WEIGHTS:
        updated = reader.with_image(new_memory, weight)
        scores = _scores(updated, embedded)
        if _lead(scores, updated.index.classes.index(name)) >= _MIN_LEAD:
            break
    if weight > 1:
        record = dataclasses.replace(record, classes=record.classes.with_image_weight(weight))
        new_memory = memory.with_task(record)
    learner.memory = compact(new_memory)
    return Correction(record, updated, scores.softmax(dim=0))


def confirm(learner: Learner, images: Sequence[Any], files: Sequence[ImageFile] | None = None) -> list[TaskRecord]:
    """Learn images, except corrected ones, each as the class that is predicted for it; see `Learner.confirm`."""
    reader, memory, records = learner.reader, learner.memory, list[TaskRecord]()
    tables = [task.classes for task in memory.tasks if task.selection == "corrected"]
    corrected_digests = {number for table in tables for number in table.file_digests.tolist()}
    for row, image in enumerate(images):
        single = as_images(image, learner.backbone.preprocessing)
        file, embedded = files[row] if files else ImageFile.of(image, single), learner.task_images(single, "confirmed")
        if digest(file.content) in corrected_digests:
            continue
        label = reader.index.classes[int(_scores(reader, embedded).argmax())]
        memory = _without(memory, file)
        record = _record(learner, memory, embedded, label, file, label)
        records.append(dataclasses.replace(record, confirmed=True))
        memory = compact(memory.with_task(records[-1]))
    learner.memory = memory
    return records


def _scores(reader: Reader, images: TaskImages) -> Tensor:
    """Return the logits [C] of one image, which is embedded once under each prompt that the reader tries."""

    def embed(rows: Tensor, numbers: Tensor | None) -> Tensor:
        prompts = [None] * len(rows) if numbers is None else [reader.index.prompts[n] for n in numbers.tolist()]
        vectors = [images.features(prompt)[int(row)] for row, prompt in zip(rows, prompts, strict=True)]
        features = torch.stack(vectors) if vectors else torch.empty(0, 1, images.backbone.dim)
        return features[:, :1].flatten(1) if reader.layers == "last" else features.flatten(1)

    return reader.match(embed, 1).scores[0] / reader.temperature


def _lead(scores: Tensor, column: int) -> float:
    """Return the logit of a class less the greatest logit [C] of another class."""
    rivals = scores.index_fill(0, torch.tensor(column), -torch.inf)
    return float(scores[column] - rivals.max())


def _without(memory: Memory, file: ImageFile) -> Memory:
    """Return the memory without an earlier correction or confirmation of the same image."""
    name = correction_name(digest(file.content))
    return memory if name not in memory.task_names else Memory(task for task in memory.tasks if task.name != name)


def _record(learner: Learner, memory: Memory, images: TaskImages, name: str, file: ImageFile, label: str) -> TaskRecord:
    """Return the record of one image of class `name`, for which class `label` was predicted."""
    number = digest(file.content)
    record = learn_class(name, images, memory, learner.settings).computed_in(learner.backbone.precision)
    size = None if file.name is None else len(file.content)
    return dataclasses.replace(
        record,
        name=correction_name(number),
        classes=record.classes.with_rows("seen", [torch.tensor([number])]),
        metadata=dataclasses.replace(record.metadata, file=file.name, image_bytes=size),
        corrected_from=label,
    )
