"""Estimate a model's accuracy by leave-one-out; evaluate a task on its held-out images, and learn these afterwards."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.data.images import ImageSet
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.paper import diagnostics
from protosteer.paper.task import task_seed
from protosteer.rules import RULES, Embeddings
from protosteer.runtime.progress import OnStage, counting
from protosteer.util.statistics import Accuracy


def loo_accuracy(learner: Learner) -> Accuracy | None:
    """Return the leave-one-out accuracy over stored images of all classes; None if the rule or one class has none."""
    loo = learner.reader.loo_predictions()
    if loo is None or not len(loo.correct) or len(learner.classes) < 2:
        return None
    return Accuracy(int(loo.correct.sum()), len(loo.correct))


@dataclass(frozen=True)
class Check:
    """Actual and predicted labels of held-out images, among all classes that the model knows."""

    labels: list[str]
    predicted: list[str]

    @classmethod
    def make(cls, learner: Learner, name: str, images: ImageSet, labels: list[str], on_stage: OnStage | None) -> Check:
        """Predict the held-out images of task `name`, whose actual labels are given."""
        return cls(labels, _answers(learner, name, "checking", images, on_stage)[0])

    @property
    def accuracy(self) -> Accuracy:
        """How many images were classified correctly."""
        return Accuracy(sum(a == b for a, b in zip(self.labels, self.predicted, strict=True)), len(self.labels))

    def per_class(self) -> dict[str, tuple[int, int]]:
        """Return for each class its number of held-out images, and how many were classified correctly."""
        support = Counter(self.labels)
        correct = Counter(a for a, b in zip(self.labels, self.predicted, strict=True) if a == b)
        return {name: (support[name], correct[name]) for name in support}

    def confused(self, limit: int = 5) -> list[tuple[str, str, int]]:
        """Return (actual class, predicted class, count), the most frequent confusions first."""
        return most_confused(Counter(zip(self.labels, self.predicted, strict=True)), limit)


def most_confused(pairs: Counter[tuple[str, str]], limit: int) -> list[tuple[str, str, int]]:
    """Return the most frequent pairs of actual and predicted class that differ, with their counts."""
    mistakes = [(*pair, count) for pair, count in pairs.items() if pair[0] != pair[1]]
    return sorted(mistakes, key=lambda mistake: (-mistake[2], mistake[:2]))[:limit]


def with_heldout_similarities(
    record: TaskRecord, learner: Learner, images: ImageSet, labels: list[str], on_stage: OnStage | None
) -> TaskRecord:
    """Return the task with the similarities of held-out images to its prototypes, as if it were the only task.

    CPP inference takes its rejection threshold from them.
    """
    task_learner = Learner(learner.backbone, learner.settings.replace(rule=learner.reader.rule))
    task_learner.memory = Memory([record])
    _, similarities = _answers(task_learner, record.name, "calibrating", images, on_stage)
    masks = {name: torch.tensor([label == name for label in labels]) for name in record.class_names}
    parts = [similarities[rows] if rows.any() else None for rows in masks.values()]
    return dataclasses.replace(record, classes=record.classes.with_rows("held_out", parts))


def _answers(
    learner: Learner, name: str, stage: str, images: ImageSet, on_stage: OnStage | None
) -> tuple[list[str], Tensor]:
    """Return predicted classes of H held-out images, and the greatest similarity of each [H]."""
    labels: list[str] = []
    similarities: list[Tensor] = []
    report = counting(on_stage, name, stage, len(images))
    for part in learner.stream(images):
        labels += part.labels
        similarities.append(part.similarities.amax(dim=1))
        report(len(labels))
    return labels, torch.cat(similarities)


def refit(
    learner: Learner, record: TaskRecord, images: ImageSet, labels: Sequence[str], on_stage: OnStage | None = None
) -> TaskRecord:
    """Return a task with its prompts as they are, whose classes are summarised from all its images.

    Without a prompt, this is the record that learning the images would give. The learner has the backbone, and the
    settings that the task was learned by.
    """
    settings, rule = learner.settings, RULES[learner.settings.rule]
    task_images, prompt = learner.task_images(images, record.name, on_stage), record.prompt
    plain_features, values = task_images.features(None), task_images.embed(prompt)
    shared_features = None if record.shared_prompt is None else task_images.features(record.shared_prompt)
    embeddings, seed = Embeddings(plain_features, values, shared_features), task_seed(settings.seed, record.class_names)
    place = {name: i for i, name in enumerate(record.class_names)}
    numbers = torch.tensor([place[label] for label in labels])
    classes = ClassTable.of(
        rule.summarise(name, embeddings.of_class(numbers == i), settings, seed, prompted=prompt is not None)
        for i, name in enumerate(record.class_names)
    )
    metadata = dataclasses.replace(
        record.metadata,
        images=len(labels),
        key_spread=round(diagnostics.spread(plain_features[:, 0]), 6),
        value_spread=round(diagnostics.spread(values), 6),
    )
    return dataclasses.replace(record, classes=classes, metadata=metadata)
