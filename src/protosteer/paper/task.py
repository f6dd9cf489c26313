"""Learn one task, Algorithm 1 of the paper: key prototypes, a prompt, value prototypes."""

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
from protosteer.paper.trainer import TrainedPrompt, train_prompt
from protosteer.settings import Settings
from protosteer.util.training_state import Callback


class Embedder(Protocol):
    """The interface of n images that can be embedded."""

    def embed(self, prompt: Tensor | None) -> Tensor:
        """Embed all images, by the evaluation transform, under a prompt [S, L, D] or None: [n, D]."""


class TrainingImages(Embedder, Protocol):
    """The interface of one task's images, embedded or as augmented batches."""

    def views(self, batches: Sequence[Tensor], generator: torch.Generator) -> Iterable[Tensor]:
        """Augment batches of rows [N]: yields tokens [N, T, D]; see `trainer.Views`."""


@dataclass(frozen=True)
class LearnedTask:
    """The outcome of Algorithm 1 for n images of K classes."""

    keys: Tensor  # [n, D]: embeddings without a prompt
    values: Tensor  # [n, D]: embeddings under the task's prompt; without one, the keys
    labels: Tensor  # [n]: classes, 0 to K - 1
    training: TrainedPrompt | None  # None: no prompt was trained
    settings: Settings
    seed: int

    @property
    def prompt(self) -> Tensor | None:
        """P^t [S, L, D]; None if no prompt was trained."""
        return self.training.prompt if self.training else None

    @cached_property
    def key_prototypes(self) -> list[Centroids]:
        """U: at most C key prototypes per class."""
        return self._prototypes(self.keys)

    @cached_property
    def value_prototypes(self) -> list[Centroids]:
        """U hat: at most C value prototypes per class."""
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
    """Learn one task by Algorithm 1: images [n] with labels [n] in, embeddings and a prompt out.

    Args:
        images: The n training images of the task.
        labels: [n], their classes as numbers 0 to K - 1.
        encoder: The frozen ViT f_theta.
        settings: `prompts=False` gives the training-free baseline of Sec. 3.2.
        start: The previous task's prompt [S, L, D].
        anchors: Value prototypes of all classes of earlier tasks.
        seed: Seed of everything random: see `task_seed`.
        callbacks: Called during the training of the prompt.
        on_keys: Called with the keys [n, D] before training begins.
    """
    keys = images.embed(None)  # [n, D]: f_theta(x)
    _warn(diagnostics.near_chance(keys, labels))
    if on_keys:
        on_keys(keys)
    if not settings.prompts:
        return LearnedTask(keys, keys, labels, None, settings, seed)
    training = train_prompt(encoder, images.views, labels, settings, start, anchors, seed, callbacks)
    values = images.embed(training.prompt)  # [n, D]: f_theta,P(x)
    _warn(diagnostics.collapse(keys, values, labels))
    return LearnedTask(keys, values, labels, training, settings, seed)


def class_prototypes(embeddings: Tensor, count: int, settings: Settings, seed: int) -> Centroids:
    """Compute at most `count` prototypes of one class from its embeddings [m, D], clustered as the settings say."""
    return centroids(embeddings, count, settings.clustering, settings.assign_labels, seed % 2**32)


def task_seed(seed: int, classes: Sequence[str]) -> int:
    """Derive a task's seed from the user's seed and the task's classes, so that the order of tasks does not matter."""
    digest = hashlib.sha256(json.dumps([seed, sorted(classes)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _warn(message: str | None) -> None:
    if message:
        warnings.warn(message, ProtosteerWarning, stacklevel=3)
