"""Learning one task, Algorithm 1 of the paper: keys, prompt, values, centroids. Its outcome is one record."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from protosteer.errors import ProtosteerWarning
from protosteer.method import health
from protosteer.method.encoder import Encoder
from protosteer.method.inference import Index, nearest_task
from protosteer.method.memory import About, ClassRecord, Memory, TaskRecord
from protosteer.method.prototypes import Centroids, centroids, left_out_similarity
from protosteer.method.training import Listener, Trained, train_prompt
from protosteer.settings import Settings

# A class of few images gets one centroid per so many of them.
_IMAGES_PER_CENTROID = 5


class TaskImages(Protocol):
    """The images of one task."""

    def embed(self, prompt: Tensor | None) -> Tensor:
        """[n, D]: all of them under a prompt, or without one, by the evaluation transform."""

    def views(self, batches: Sequence[Tensor]) -> Iterable[Tensor]:
        """See `training.Views`."""


def learn_task(
    name: str,
    classes: Sequence[str],
    images: TaskImages,
    labels: Tensor,
    encoder: Encoder,
    memory: Memory,
    settings: Settings,
    listeners: Sequence[Listener] = (),
) -> TaskRecord:
    """The record of a task. labels: [n], places in `classes`. memory: what has been learned before."""
    earlier = Memory() if settings.independent else memory
    seed = task_seed(settings.seed, classes)

    keys = images.embed(None)
    _warn(health.near_chance(keys, labels))
    values, trained = keys, None
    if trains_prompt(settings, len(classes), memory):
        start = earlier.tasks[-1].prompt if len(earlier) else None
        prototypes = earlier.prototypes(settings.noise)
        trained = train_prompt(encoder, images.views, labels, settings, start, prototypes, seed, listeners)
        values = images.embed(trained.prompt)
        _warn(health.collapse(keys, values, labels))

    records = tuple(
        _class_record(label, keys[labels == i], values[labels == i], settings.centroids, settings, seed)
        for i, label in enumerate(classes)
    )
    prompt = trained.prompt if trained else None
    return TaskRecord(name, records, prompt, settings.independent, _about(settings, keys, values, trained))


def trains_prompt(settings: Settings, classes: int, memory: Memory) -> bool:
    """One class with nothing to be told from gets no prompt: training would draw all its images together."""
    alone = classes == 1 and (settings.independent or not len(memory))
    return settings.prompts and not alone


def learn_class(name: str, images: TaskImages, memory: Memory, settings: Settings) -> TaskRecord:
    """The record of one class of a handful of images, a task of its own: prototypes alone, nothing is
    trained.

    It gets a copy of the prompt of the task whose keys are nearest, and one centroid per five images, since
    fewer make none that is better than their common mean.
    """
    keys = images.embed(None)
    nearest = memory.tasks[nearest_task(Index.build(memory), keys)] if len(memory) else None
    prompt = nearest.prompt if nearest else None
    values = keys if prompt is None else images.embed(prompt)
    count = min(settings.centroids, max(1, len(keys) // _IMAGES_PER_CENTROID))
    seed = task_seed(settings.seed, [name])
    record = _class_record(name, keys, values, count, settings, seed, left_out_similarity(values))
    # What a copy of a prompt was trained with is what the prompt was trained with.
    independent = nearest is None or prompt is None or nearest.independent
    about = About(settings.to_dict(), len(keys))
    return TaskRecord(memory.free_name(name), (record,), prompt, independent, about, few_shot=True)


def task_seed(seed: int, classes: Sequence[str]) -> int:
    """Randomness belongs to a task's own classes, not to its place in the order of tasks."""
    digest = hashlib.sha256(json.dumps([seed, sorted(classes)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _class_record(
    name: str,
    keys: Tensor,
    values: Tensor,
    count: int,
    settings: Settings,
    seed: int,
    similarities: Tensor | None = None,
) -> ClassRecord:
    def cluster(embeddings: Tensor) -> Centroids:
        return centroids(embeddings, count, settings.clustering, settings.assign_labels, seed % 2**32)

    return ClassRecord(name, cluster(keys).means, cluster(values), similarities)


def _about(settings: Settings, keys: Tensor, values: Tensor, trained: Trained | None) -> About:
    return About(
        settings=settings.to_dict(),
        images=len(keys),
        key_spread=round(health.spread(keys), 6),
        value_spread=round(health.spread(values), 6),
        loss=trained.epochs[-1].loss if trained else None,
        accuracy=trained.epochs[-1].accuracy if trained else None,
        trained_parameters=trained.parameters if trained else None,
    )


def _warn(message: str | None) -> None:
    if message:
        warnings.warn(message, ProtosteerWarning, stacklevel=2)
