"""Embed a task's images and yield its augmented batches, in one process or on all ranks.

On several ranks, each encodes its own rows of every batch. The contrastive loss is one of a whole batch. So every rank
gathers all embeddings [N, D] and computes the same loss and the same gradient as a single process would. Each rank
propagates the gradient of its own rows back to the prompt, and the prompt's gradients are summed. Neck and optimiser
are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.paper.prompts import Encoder
from protosteer.runtime.progress import OnStage, counting
from protosteer.settings import Settings
from protosteer.util.distributed import GatherRows, ProcessGroup, SumGradients, process_group


class TaskImages:
    """The `TrainingImages` of `paper.task`, with embeddings of several layers, too.

    A prompt is trained by the last layer. Both kinds of embeddings come from the same forward passes.
    """

    def __init__(
        self,
        images: ImageSet,
        backbone: Backbone,
        settings: Settings,
        task: str,
        on_stage: OnStage | None = None,
        layers: str = "last",
    ):
        self.images = images
        self.layers = layers
        self._features: dict[bytes | None, Tensor] = {}  # by prompt
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
        """Embed all images under a prompt [S, L, D], or without one: [n, D]."""
        return self.features(prompt)[:, 0]

    def features(self, prompt: Tensor | None) -> Tensor:
        """Embed all images in S feature spaces under a prompt, or without one: [n, S, D]; computed once."""
        key = None if prompt is None else prompt.detach().cpu().contiguous().numpy().tobytes()
        if key not in self._features:
            backbone, doing = self.backbone.reading(self.layers), "keys" if prompt is None else "values"
            on_batch = counting(self.on_stage, self.task, doing, len(self.images))
            embeddings = backbone.embed_set(self.images, prompt, self.settings.embed_batch_size, on_batch)
            self._features[key] = embeddings.unflatten(1, (-1, backbone.dim))
        return self._features[key]

    def views(self, batches: Sequence[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
        """Yield augmented tokens, before any prompt, of this rank's rows of each batch: see `paper.trainer.Views`."""
        # Imports kornia, which prediction does not need.
        from protosteer.data.augment import Augmentation, augmented

        augment = Augmentation(self.backbone.preprocessing, self.settings.augmentation)
        pictures = augmented(self.images, batches, augment, self.backbone.device, process_group(), generator)
        for rows, pixels in zip(batches, pictures, strict=True):
            if self.parallel:
                self.parallel.batch_size = len(rows)
            yield self.backbone.trunk(pixels, self.settings.prompt_from_layer - 1)


class DataParallelEncoder:
    """Encode tokens of this rank's rows into the embeddings of a whole batch of `batch_size` images."""

    def __init__(self, backbone: Backbone, group: ProcessGroup):
        self.backbone, self.group, self.batch_size = backbone, group, 0
        self.dim, self.depth, self.prompt_shape = backbone.dim, backbone.depth, backbone.prompt_shape
        self.width = backbone.width

    @property
    def device(self) -> torch.device:
        """The device of the backbone."""
        return self.backbone.device

    def embed_tokens(self, tokens: Tensor, layers: int, prompt: Tensor | None = None) -> Tensor:
        """Finish tokens [n, T, D] of this rank under a prompt [S, L, D]; return embeddings [N, D] of the batch."""
        prompt = SumGradients.apply(prompt, self.group)  # type: ignore[no-untyped-call]
        embeddings = self.backbone.embed_tokens(tokens, layers, prompt)
        return GatherRows.apply(embeddings, self.group.shares(self.batch_size), self.group)  # type: ignore[no-untyped-call]
