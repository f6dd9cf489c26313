"""Embed a task's images and yield its augmented batches, in one process or on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.paper.prompts import Encoder
from protosteer.runtime.data_parallel import DataParallelEncoder, augmented_tokens
from protosteer.runtime.progress import OnStage, Stage
from protosteer.settings import Settings
from protosteer.util.distributed import process_group


class TaskImages:
    """The `TrainingImages` of `paper.task`, which also give embeddings of several layers.

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
        """All images under a prompt [S, L, D], or without one -> [n, D]."""
        return self.features(prompt)[:, 0]

    def features(self, prompt: Tensor | None) -> Tensor:
        """All images under a prompt [S, L, D], or without one -> [n, S, D]; computed once."""

        def on_batch(done: int) -> None:
            if self.on_stage:
                self.on_stage(Stage(self.task, "values" if prompt is not None else "keys", done, len(self.images)))

        key = None if prompt is None else prompt.detach().cpu().contiguous().numpy().tobytes()
        if key not in self._features:
            backbone = self.backbone.reading(self.layers)
            embeddings = backbone.embed_set(self.images, prompt, self.settings.embed_batch_size, on_batch)
            self._features[key] = embeddings.unflatten(1, (-1, backbone.dim))
        return self._features[key]

    def views(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the augmented tokens of each batch of row numbers, see `paper.trainer.Views`."""
        if self.parallel is None:
            return augmented_tokens(self.images, batches, self.backbone, self.settings)
        return self.parallel.views(self.images, batches, self.settings)
