"""What methods are made of, beside the room `method/`: labels as numbers, augmented views, a loop that can be
resumed.

`seal` and `unseal` make a state of tensors and plain data into the contents of a file and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.data.canvas import kept
from protosteer.method.task import task_seed
from protosteer.method.training import State, update
from protosteer.methods.base import Lesson
from protosteer.running.listeners import listeners
from protosteer.running.progress import OnStage, Stage
from protosteer.running.resume import Bookmark
from protosteer.util.sealed import seal, unseal

__all__ = ["embedded", "fit", "numbered", "seal", "task_seed", "unseal"]


def numbered(task: Lesson, known: Sequence[str]) -> tuple[list[str], Tensor]:
    """The task's classes in alphabetical order, and its labels [n] as numbers after those known."""
    classes = sorted(set(task.train_labels))
    number = {name: len(known) + i for i, name in enumerate(classes)}
    return classes, torch.tensor([number[label] for label in task.train_labels])


def embedded(
    task: Lesson, backbone: Backbone, batch_size: int, on_stage: OnStage | None = None, doing: str = "keys"
) -> Tensor:
    """[n, D]: the task's training images by the evaluation transform."""

    def on_batch(done: int) -> None:
        if on_stage:
            on_stage(Stage(task.name, doing, done, len(task.train)))

    return backbone.embed_set(task.train, None, batch_size, on_batch)


def fit(
    task: Lesson,
    labels: Tensor,
    backbone: Backbone,
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    settings: Any,
    on_stage: OnStage | None = None,
    bookmark: Bookmark | None = None,
) -> None:
    """Train parameters on augmented images of a task; killed at any step, it goes on to the same bits.

    loss: of normalised images [B, 3, H, W] and their labels [B], with the embeddings [B, D] behind it.
    settings has `epochs`, `batch_size`, `augmentation`, `gradient_clip` and `to_dict`. Seed torch beforehand.
    """
    from protosteer.data.augment import Augmentation, augmented

    images, device = kept(task.train), backbone.device
    augment = Augmentation(backbone.preprocessing, settings.augmentation)
    state = State(parameters, optimiser, labels, settings.batch_size, settings.epochs)
    which = {"settings": settings.to_dict(), "classes": sorted(set(task.train_labels)), "images": len(labels)}
    heard = listeners(task.name, which, on_stage, bookmark)
    for listener in heard:
        listener.begin(state)
    while state.epoch < settings.epochs:
        batches = state.batches_left()
        for rows, views in zip(batches, augmented(images, batches, augment, device), strict=True):
            value, embeddings = loss(views, labels[rows].to(device))
            update(value, [list(parameters.values())], optimiser, settings.gradient_clip)
            state.record(value, embeddings)
            for listener in heard:
                listener.step(state)
        state.end_epoch()
