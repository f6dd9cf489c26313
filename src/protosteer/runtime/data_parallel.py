"""Train one prompt on several ranks: each encodes its own rows of every batch.

The contrastive loss is one of a whole batch. So every rank gathers all embeddings [N, D] and computes the same
loss and the same gradient as a single process would. Each rank propagates the gradient of its own rows back to
the prompt, and the prompt's gradients are summed. Neck and optimiser are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.settings import Settings
from protosteer.util.distributed import GatherRows, ProcessGroup, SumGradients, process_group


def augmented_tokens(
    images: ImageSet, batches: Sequence[Tensor], generator: torch.Generator, backbone: Backbone, settings: Settings
) -> Iterator[Tensor]:
    """Augment this rank's rows of each batch of row numbers [N] and yield their tokens before any prompt."""
    # Imports kornia, which prediction does not need.
    from protosteer.data.augment import Augmentation, augmented

    augment = Augmentation(backbone.preprocessing, settings.augmentation)
    for pictures in augmented(images, batches, augment, backbone.device, process_group(), generator):
        yield backbone.trunk(pictures, settings.prompt_from_layer - 1)


class DataParallelEncoder:
    """Encode tokens of this rank's rows into the embeddings of the whole batch.

    Call `rest` with the tokens that `views` has just yielded: `views` knows the size of their batch.
    """

    def __init__(self, backbone: Backbone, group: ProcessGroup):
        self.backbone, self.group = backbone, group
        self.dim, self.depth, self.prompt_shape = backbone.dim, backbone.depth, backbone.prompt_shape
        self.width = backbone.width
        self.shares: list[slice] = []

    @property
    def device(self) -> torch.device:
        """The device of the backbone."""
        return self.backbone.device

    def views(
        self, images: ImageSet, batches: Sequence[Tensor], generator: torch.Generator, settings: Settings
    ) -> Iterator[Tensor]:
        """Yield `augmented_tokens`."""
        tokens = augmented_tokens(images, batches, generator, self.backbone, settings)
        for rows, own in zip(batches, tokens, strict=True):
            self.shares = self.group.shares(len(rows))
            yield own

    def rest(self, tokens: Tensor, layers: int, prompt: Tensor | None = None) -> Tensor:
        """Tokens [n, T, D] of this rank and the prompt [S, L, D] -> embeddings [N, D] of the batch."""
        prompt = SumGradients.apply(prompt, self.group)  # type: ignore[no-untyped-call]
        own = self.backbone.rest(tokens, layers, prompt)
        return GatherRows.apply(own, self.shares, self.group)  # type: ignore[no-untyped-call]
