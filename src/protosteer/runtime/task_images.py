"""The images of one task as a backbone sees them, here or shared out among processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.paper.prompts import Encoder
from protosteer.runtime.data_parallel import SharedEncoder, own_tokens
from protosteer.runtime.progress import OnStage, Stage
from protosteer.settings import Settings
from protosteer.util.distributed import here


class TaskImages:
    """The `TrainingImages` of `method.task`."""

    def __init__(
        self,
        images: ImageSet,
        backbone: Backbone,
        settings: Settings,
        task: str,
        on_stage: OnStage | None = None,
    ):
        self.images = images
        self.backbone = backbone
        self.settings = settings
        self.task = task
        self.on_stage = on_stage
        self.shared = SharedEncoder(backbone, here()) if here().size > 1 else None

    @property
    def encoder(self) -> Encoder:
        """What makes embeddings of `views`."""
        return self.shared or self.backbone

    def embed(self, prompt: Tensor | None) -> Tensor:
        def on_batch(done: int) -> None:
            if self.on_stage:
                self.on_stage(
                    Stage(self.task, "values" if prompt is not None else "keys", done, len(self.images))
                )

        return self.backbone.embed_set(self.images, prompt, self.settings.embed_batch_size, on_batch)

    def views(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        if self.shared is None:
            return own_tokens(self.images, batches, self.backbone, self.settings)
        return self.shared.views(self.images, batches, self.settings)
