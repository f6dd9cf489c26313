"""Learn one task, or one class of a few images, as a record of a model.

`paper.task` does the learning. Here is what a model adds to it: records, the default rule's class summaries, the
shared prompt, a record that is usable before its prompt is trained, few-shot classes, corrections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.evidence.prototype_summary import round_to_half, summarise_class
from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskMetadata, TaskRecord
from protosteer.paper import diagnostics
from protosteer.paper import task as algorithm1
from protosteer.paper.inference import PrototypeIndex
from protosteer.paper.prompts import Encoder
from protosteer.paper.prototypes import Centroids
from protosteer.paper.task import Embedder, TrainingImages, class_prototypes, task_seed
from protosteer.paper.trainer import Trained
from protosteer.settings import Settings
from protosteer.util.training_state import Callback

# A few-shot class gets one prototype per so many images: fewer make none that is better than their mean.
_IMAGES_PER_PROTOTYPE = 5


@dataclass(frozen=True)
class Embeddings:
    """The same n images in each feature space, [n, D] each."""

    plain: Tensor  # without a prompt
    values: Tensor  # under their task's prompt; without one, the plain ones
    shared: Tensor | None = None  # under the shared prompt

    def of_class(self, rows: Tensor) -> Embeddings:
        """Those of some rows."""
        shared = None if self.shared is None else self.shared[rows]
        return Embeddings(self.plain[rows], self.values[rows], shared)


def learn_task(
    name: str,
    classes: Sequence[str],
    images: TrainingImages,
    labels: Tensor,
    encoder: Encoder,
    memory: Memory,
    settings: Settings,
    callbacks: Sequence[Callback] = (),
    shared_prompt: Tensor | None = None,
    on_usable: Callable[[TaskRecord], None] | None = None,
) -> TaskRecord:
    """Learn a task and return its record.

    Args:
        name: Of the task.
        classes: Names of its classes.
        images: Its training images.
        labels: [n], positions in `classes`.
        encoder: The frozen ViT.
        memory: What has been learned before.
        settings: How to learn.
        callbacks: Follow the training of the prompt.
        shared_prompt: Without one, the first task's prompt becomes the shared prompt of the default rule.
        on_usable: Is given the record as it is before its prompt is trained.
    """
    earlier = Memory() if settings.independent else memory
    seed = task_seed(settings.seed, classes)
    trains = trains_prompt(settings, classes, memory, shared_prompt)
    shared: Tensor | None = None

    def record(embeddings: Embeddings, training: Trained | None, shared_prompt: Tensor | None) -> TaskRecord:
        count = settings.centroids if training or settings.rule == "paper" else 1
        records = ClassTable.of(
            summarise(label, embeddings.of_class(labels == i), count, settings, seed)
            for i, label in enumerate(classes)
        )
        prompt, metadata = training.prompt if training else None, _metadata(settings, embeddings, training)
        return TaskRecord(name, records, prompt, settings.independent, metadata, shared_prompt=shared_prompt)

    def on_keys(keys: Tensor) -> None:
        nonlocal shared
        shared = None if shared_prompt is None else images.embed(shared_prompt)
        if trains and on_usable:
            usable = record(Embeddings(keys, keys, shared), None, shared_prompt)
            metadata = dataclasses.replace(usable.metadata, unfinished=True)
            on_usable(dataclasses.replace(usable, metadata=metadata))

    start = earlier.tasks[-1].prompt if trains and len(earlier) else None
    # A class that is learned again is no negative of itself.
    anchors = earlier.anchors(settings.noise, without=classes) if trains else None
    learned = algorithm1.learn_task(
        images, labels, encoder, settings.replace(prompts=trains), start, anchors, seed, callbacks, on_keys
    )
    if learned.prompt is not None and prompt_becomes_shared(settings, memory, shared_prompt):
        shared, shared_prompt = learned.values, learned.prompt
    return record(Embeddings(learned.keys, learned.values, shared), learned.training, shared_prompt)


def trains_prompt(
    settings: Settings, classes: Sequence[str], memory: Memory, shared_prompt: Tensor | None = None
) -> bool:
    """Whether a task of these classes gets a prompt.

    A single class without any other gets none: training would draw all its images together. Neither do, by the
    default rule, more images of known classes.
    """
    earlier = set() if settings.independent else set(memory.classes)
    alone = len(classes) == 1 and not earlier - set(classes)
    grown = settings.rule == "evidence" and earlier >= set(classes)
    served = settings.prompt_tasks == "first" and (shared_prompt is not None or len(memory) > 0)
    return settings.prompts and not alone and not grown and not served


def prompt_becomes_shared(settings: Settings, memory: Memory, shared_prompt: Tensor | None) -> bool:
    """Whether the prompt of the task that is learned now will serve all later classes too."""
    first = shared_prompt is None and not len(memory)
    return settings.rule == "evidence" and first and not settings.independent


def learn_class(name: str, images: Embedder, memory: Memory, settings: Settings) -> TaskRecord:
    """Learn one class of a few images as a task of its own, without training.

    For CPP inference it gets a copy of the prompt of the task whose keys are nearest. The default rule needs none.
    """
    evidence = settings.rule == "evidence"
    shared_prompt = memory.shared_prompt if evidence else None
    plain = images.embed(None)
    shared = None if shared_prompt is None else images.embed(shared_prompt)
    nearest = None
    if len(memory) and not evidence:
        nearest = memory.tasks[nearest_task(Index.build(memory).prototypes, plain)]
    prompt = nearest.prompt if nearest else None
    values = plain if prompt is None else images.embed(prompt)
    count = 1 if evidence else min(settings.centroids, max(1, len(values) // _IMAGES_PER_PROTOTYPE))
    embeddings, seed = Embeddings(plain, values, shared), task_seed(settings.seed, [name])
    record = summarise(name, embeddings, count, settings, seed)
    if not evidence:
        record = dataclasses.replace(record, heldout_similarities=loo_similarity(values))
    # A copied prompt was trained with whatever its original was trained with.
    independent = nearest is None or prompt is None or nearest.independent
    return TaskRecord(
        memory.free_name(name),
        ClassTable.of([record]),
        prompt,
        independent,
        TaskMetadata(settings.to_dict(), len(values)),
        few_shot=True,
        shared_prompt=shared_prompt,
    )


def summarise(name: str, embeddings: Embeddings, count: int, settings: Settings, seed: int) -> ClassRecord:
    """Make what the settings' rule stores of a class; `count`: its value prototypes."""
    rule = summarise_evidence if settings.rule == "evidence" else summarise_paper
    return rule(name, embeddings, count, settings, seed)


def summarise_paper(
    name: str, embeddings: Embeddings, count: int, settings: Settings, seed: int
) -> ClassRecord:
    """Store a class as CPP does: key prototypes and value prototypes."""
    keys = class_prototypes(embeddings.plain, count, settings, seed)
    return ClassRecord(name, keys.means, class_prototypes(embeddings.values, count, settings, seed))


def summarise_evidence(
    name: str, embeddings: Embeddings, count: int, settings: Settings, seed: int
) -> ClassRecord:
    """Store a class for the default classifier: a summary per feature space, and value prototypes."""
    values = class_prototypes(embeddings.values, count, settings, seed)
    plain = summarise_class(embeddings.plain, seed)
    shared = None if embeddings.shared is None else summarise_class(embeddings.shared, seed)
    values = Centroids(round_to_half(values.means), round_to_half(values.deviations), values.counts)
    return ClassRecord(name, plain.points, values, plain=plain, shared=shared)


def nearest_task(index: PrototypeIndex, queries: Tensor) -> int:
    """Find the task whose keys are most similar to the queries [n, D], on average over the queries."""
    similarity = F.normalize(queries, dim=1) @ index.keys.T
    empty = torch.full((len(queries), len(index.prompt_tasks)), -torch.inf)
    per_task = empty.scatter_reduce_(1, index.key_tasks.expand(len(queries), -1), similarity, "amax")
    return int(per_task.mean(dim=0).argmax())


def loo_similarity(embeddings: Tensor) -> Tensor | None:
    """[n]: cosine of each embedding [n, D] of a class to the mean of the others; None for a single one."""
    if len(embeddings) < 2:
        return None
    return F.cosine_similarity(embeddings, embeddings.sum(dim=0) - embeddings, dim=1)


def _metadata(settings: Settings, embeddings: Embeddings, training: Trained | None) -> TaskMetadata:
    return TaskMetadata(
        settings=settings.to_dict(),
        images=len(embeddings.plain),
        key_spread=round(diagnostics.spread(embeddings.plain), 6),
        value_spread=round(diagnostics.spread(embeddings.values), 6),
        loss=training.epochs[-1].loss if training else None,
        accuracy=training.epochs[-1].accuracy if training else None,
        trained_parameters=training.parameters if training else None,
    )
