"""Store more images of a task that is learned already, under the prompts that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from protosteer.data.images import ImageSet
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.records import TaskRecord
from protosteer.paper import diagnostics
from protosteer.paper.task import task_seed
from protosteer.rules import RULES, Embeddings
from protosteer.runtime.progress import OnStage


def refit(
    learner: Learner, record: TaskRecord, images: ImageSet, labels: Sequence[str], on_stage: OnStage | None = None
) -> TaskRecord:
    """Return a task with its prompts as they are, whose classes are summarised from these images.

    Without a prompt, this is the record that learning the images would give.

    Args:
        learner: Has the backbone, and the settings that the task was learned by.
        record: The task.
        images: n images, also those that it was learned from.
        labels: Their classes.
        on_stage: Is given the progress.
    """
    settings, rule = learner.settings, RULES[learner.settings.rule]
    task_images = learner.task_images(images, record.name, on_stage)
    prompt, shared_prompt = record.prompt, record.shared_prompt
    plain, values = task_images.features(None), task_images.embed(prompt)
    shared = None if shared_prompt is None else task_images.features(shared_prompt)
    embeddings, seed = Embeddings(plain, values, shared), task_seed(settings.seed, record.class_names)
    numbers = plain.new_tensor([record.class_names.index(label) for label in labels])
    classes = ClassTable.of(
        rule.summarise(name, embeddings.of_class(numbers == i), settings, seed, prompted=prompt is not None)
        for i, name in enumerate(record.class_names)
    )
    metadata = dataclasses.replace(
        record.metadata,
        images=len(labels),
        key_spread=round(diagnostics.spread(plain[:, 0]), 6),
        value_spread=round(diagnostics.spread(values), 6),
    )
    return dataclasses.replace(record, classes=classes, metadata=metadata)
