"""Embed a task's images and yield its augmented batches, in one process or on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.paper.prompts import Encoder
from protosteer.runtime.data_parallel import DataParallelEncoder, augmented_tokens
from protosteer.runtime.progress import OnStage, Stage
from protosteer.settings import Settings
from protosteer.util.distributed import process_group


class TaskImages:
    """The `TrainingImages` of `paper.task`."""

    def __init__(
        self, images: ImageSet, backbone: Backbone, settings: Settings, task: str, on_stage: OnStage | None = None
    ):
        self.images = images
        self.backbone = backbone
        self.settings = settings
        self.task = task
        self.on_stage = on_stage
        group = process_group()
        self.parallel = DataParallelEncoder(backbone, group) if group.size > 1 else None

    @property
    def encoder(self) -> Encoder:
        """Turns the tokens of `views` into embeddings."""
        return self.parallel or self.backbone

    def embed(self, prompt: Tensor | None) -> Tensor:
        """All images under a prompt [S, L, D], or without one -> [n, D]."""

        def on_batch(done: int) -> None:
            if self.on_stage:
                self.on_stage(Stage(self.task, "values" if prompt is not None else "keys", done, len(self.images)))

        return self.backbone.embed_set(self.images, prompt, self.settings.embed_batch_size, on_batch)

    def views(self, batches: Sequence[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the augmented tokens of each batch of row numbers, see `paper.trainer.Views`."""
        if self.parallel is None:
            return augmented_tokens(self.images, batches, generator, self.backbone, self.settings)
        return self.parallel.views(self.images, batches, generator, self.settings)
