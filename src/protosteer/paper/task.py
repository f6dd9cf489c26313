"""One task, Algorithm 1 of the paper: key prototypes, a prompt, value prototypes."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from protosteer.errors import ProtosteerWarning
from protosteer.paper import diagnostics
from protosteer.paper.prompts import Encoder
from protosteer.paper.prototypes import Anchors, Centroids, centroids
from protosteer.paper.trainer import Trained, train_prompt
from protosteer.settings import Settings
from protosteer.util.training_state import Callback


class Embedder(Protocol):
    """Images that can be embedded."""

    def embed(self, prompt: Tensor | None) -> Tensor:
        """[n, D]: all images under a prompt [S, L, D], or without one, by the evaluation transform."""


class TrainingImages(Embedder, Protocol):
    """The images of one task, as a prompt is trained with them."""

    def views(self, batches: Sequence[Tensor], generator: torch.Generator) -> Iterable[Tensor]:
        """See `trainer.Views`."""


@dataclass(frozen=True)
class LearnedTask:
    """The outcome of Algorithm 1 for n images of K classes."""

    keys: Tensor  # [n, D]: embeddings without a prompt
    values: Tensor  # [n, D]: embeddings under the task's prompt; without one, the keys
    labels: Tensor  # [n]: 0 to K - 1
    training: Trained | None  # None: no prompt was trained
    settings: Settings
    seed: int

    @property
    def prompt(self) -> Tensor | None:
        """P^t [S, L, D]."""
        return self.training.prompt if self.training else None

    @cached_property
    def key_prototypes(self) -> list[Centroids]:
        """U: for each class at most C key prototypes."""
        return self._prototypes(self.keys)

    @cached_property
    def value_prototypes(self) -> list[Centroids]:
        """U hat: for each class at most C value prototypes."""
        return self._prototypes(self.values)

    def _prototypes(self, embeddings: Tensor) -> list[Centroids]:
        groups = [embeddings[self.labels == k] for k in range(int(self.labels.max()) + 1)]
        return [class_prototypes(group, self.settings.centroids, self.settings, self.seed) for group in groups]


def learn_task(
    images: TrainingImages,
    labels: Tensor,
    encoder: Encoder,
    settings: Settings,
    start: Tensor | None = None,
    anchors: Anchors | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    on_keys: Callable[[Tensor], None] | None = None,
) -> LearnedTask:
    """Learn one task: Algorithm 1.

    Args:
        images: The n training images of the task.
        labels: [n], their classes as numbers 0 to K - 1.
        encoder: The frozen ViT f_theta.
        settings: `prompts=False` gives the training-free baseline of Sec. 3.2.
        start: The previous task's prompt [S, L, D].
        anchors: Value prototypes of all classes of earlier tasks.
        seed: Of all that is random: see `task_seed`.
        callbacks: Follow the training of the prompt.
        on_keys: Is given the keys [n, D] before training begins.
    """
    keys = images.embed(None)  # [n, D]: f_theta(x)
    _warn(diagnostics.near_chance(keys, labels))
    if on_keys:
        on_keys(keys)
    if not settings.prompts:
        return LearnedTask(keys, keys, labels, None, settings, seed)
    trained = train_prompt(encoder, images.views, labels, settings, start, anchors, seed, callbacks)
    values = images.embed(trained.prompt)  # [n, D]: f_theta,P(x)
    _warn(diagnostics.collapse(keys, values, labels))
    return LearnedTask(keys, values, labels, trained, settings, seed)


def class_prototypes(embeddings: Tensor, count: int, settings: Settings, seed: int) -> Centroids:
    """At most `count` prototypes of one class's embeddings [m, D], clustered as the settings say."""
    return centroids(embeddings, count, settings.clustering, settings.assign_labels, seed % 2**32)


def task_seed(seed: int, classes: Sequence[str]) -> int:
    """Derive a task's seed from its classes, so that it does not depend on the order of tasks."""
    digest = hashlib.sha256(json.dumps([seed, sorted(classes)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _warn(message: str | None) -> None:
    if message:
        warnings.warn(message, ProtosteerWarning, stacklevel=3)
