"""Learn one task, or one class of a few images, as a record of a model.

`paper.task` does the learning. This module adds records, the default rule's class summaries, the shared prompt, a
record that is usable before its prompt is trained, and few-shot classes.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import TaskMetadata, TaskRecord
from protosteer.paper import diagnostics
from protosteer.paper import task as algorithm1
from protosteer.paper.inference import PrototypeIndex
from protosteer.paper.prompts import Encoder
from protosteer.paper.task import Embedder, TrainingImages, task_seed
from protosteer.paper.trainer import TrainedPrompt
from protosteer.rules import RULES, Embeddings
from protosteer.settings import Settings
from protosteer.util.text import check_name
from protosteer.util.training_state import Callback


class LayerEmbedder(Embedder, Protocol):
    """The interface of n images that can be embedded in several layers."""

    def features(self, prompt: Tensor | None) -> Tensor:
        """Embed all images, under a prompt or None, in the layers that the rule reads: [n, layers, D]."""


class TaskImages(LayerEmbedder, TrainingImages, Protocol):
    """The interface of one task's images, for training and for storing."""


def learn_task(
    name: str,
    classes: Sequence[str],
    images: TaskImages,
    labels: Tensor,
    encoder: Encoder,
    memory: Memory,
    settings: Settings,
    callbacks: Sequence[Callback] = (),
    shared_prompt: Tensor | None = None,
    on_usable: Callable[[TaskRecord], None] | None = None,
) -> TaskRecord:
    """Learn a task of named classes, with labels [n] as positions in them, and return its record.

    Without a shared prompt, the default rule makes the first task's prompt the shared one. `on_usable` is called with the
    record before its prompt is trained.
    """
    rule, earlier_memory = RULES[settings.rule], Memory() if settings.independent else memory
    seed = task_seed(settings.seed, classes)
    trains = trains_prompt(settings, classes, memory, shared_prompt)
    shared: Tensor | None = None

    def record(embeddings: Embeddings, training: TrainedPrompt | None, shared_prompt: Tensor | None) -> TaskRecord:
        records = ClassTable.of(
            rule.summarise(label, embeddings.of_class(labels == i), settings, seed, prompted=training is not None)
            for i, label in enumerate(classes)
        )
        prompt, metadata = training.prompt if training else None, _metadata(settings, embeddings, training)
        return TaskRecord(name, records, prompt, settings.independent, metadata, shared_prompt=shared_prompt)

    def on_keys(keys: Tensor) -> None:
        nonlocal shared
        shared = None if shared_prompt is None else images.features(shared_prompt)
        if trains and on_usable:
            usable = record(Embeddings(images.features(None), keys, shared), None, shared_prompt)
            metadata = dataclasses.replace(usable.metadata, unfinished=True)
            on_usable(dataclasses.replace(usable, metadata=metadata))

    start = earlier_memory.tasks[-1].prompt if trains and len(earlier_memory) else None
    # The loss must not push a class that is learned again away from its own prototypes.
    anchors = earlier_memory.anchors(settings.noise, without=classes) if trains else None
    outcome = algorithm1.learn_task(
        images, labels, encoder, settings.replace(prompts=trains), start, anchors, seed, callbacks, on_keys
    )
    if outcome.prompt is not None and prompt_becomes_shared(settings, memory, shared_prompt):
        shared, shared_prompt = images.features(outcome.prompt), outcome.prompt
    return record(Embeddings(images.features(None), outcome.values, shared), outcome.training, shared_prompt)


def trains_prompt(
    settings: Settings, classes: Sequence[str], memory: Memory, shared_prompt: Tensor | None = None
) -> bool:
    """Tell whether a prompt is trained for a task of these classes.

    There is none for a model's only class: without negatives, training would draw all its images together. By the
    default rule there is none for more images of known classes. A shared prompt is trained with the first task, unless
    tasks are independent: then no other task could use it.
    """
    earlier_classes = set() if settings.independent else set(memory.classes)
    is_only_class = len(classes) == 1 and not earlier_classes - set(classes)
    only_known_classes = not RULES[settings.rule].trains_known_classes and earlier_classes >= set(classes)
    is_first = shared_prompt is None and not len(memory) and not settings.independent
    return (
        settings.prompts
        and not is_only_class
        and not only_known_classes
        and (settings.prompt_tasks == "all" or is_first)
    )


def prompt_becomes_shared(settings: Settings, memory: Memory, shared_prompt: Tensor | None) -> bool:
    """Tell whether the prompt of the task that is learned now becomes the shared prompt."""
    is_first = shared_prompt is None and not len(memory)
    return RULES[settings.rule].uses_shared_prompt and is_first and not settings.independent


def learn_class(name: str, images: LayerEmbedder, memory: Memory, settings: Settings) -> TaskRecord:
    """Learn one class of a few images as a task of its own, without training.

    For CPP inference it gets a copy of the prompt of the task whose keys are nearest. The default rule needs none.
    """
    check_name(name, "the class")
    rule = RULES[settings.rule]
    shared_prompt = memory.shared_prompt if rule.uses_shared_prompt else None
    shared = None if shared_prompt is None else images.features(shared_prompt)
    nearest = None
    if len(memory) and rule.copies_nearest_prompt:
        nearest = memory.tasks[nearest_task(Index.build(memory).prototypes, images.embed(None))]
    prompt = nearest.prompt if nearest else None
    values = images.embed(prompt)
    embeddings, seed = Embeddings(images.features(None), values, shared), task_seed(settings.seed, [name])
    record = rule.summarise_few_shot(name, embeddings, settings, seed)
    # A copy of a prompt depends on the same tasks as its original.
    independent = nearest is None or prompt is None or nearest.independent
    return TaskRecord(
        memory.free_name(name),
        ClassTable.of([record]),
        prompt,
        independent,
        TaskMetadata(settings.to_dict(), len(values), learned=datetime.date.today().isoformat()),
        few_shot=True,
        shared_prompt=shared_prompt,
    )


def nearest_task(index: PrototypeIndex, queries: Tensor) -> int:
    """Find the task whose keys are most similar to the queries [n, D], on average over the queries."""
    similarity = F.normalize(queries, dim=1) @ index.keys.T
    maxima = torch.full((len(queries), len(index.prompt_tasks)), -torch.inf)
    maxima = maxima.scatter_reduce_(1, index.key_tasks.expand(len(queries), -1), similarity, "amax")
    return int(maxima.mean(dim=0).argmax())


def _metadata(settings: Settings, embeddings: Embeddings, training: TrainedPrompt | None) -> TaskMetadata:
    return TaskMetadata(
        settings=settings.to_dict(),
        images=len(embeddings.plain),
        key_spread=round(diagnostics.spread(embeddings.plain[:, 0]), 6),
        value_spread=round(diagnostics.spread(embeddings.values), 6),
        loss=training.epochs[-1].loss if training else None,
        accuracy=training.epochs[-1].accuracy if training else None,
        trained_parameters=training.parameters if training else None,
    )
