"""One prompt, trained by several processes: each sees its own rows of every batch.

The contrastive loss is one of a whole batch, so the leader gathers all embeddings [N, D], has the loss and
its gradient as one process would, and sends every helper the gradient of its own rows. Gradients of the
prompt are summed. The neck, the optimiser and everything drawn at random are the leader's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.paper.prompts import prompt_shape
from protosteer.settings import Settings
from protosteer.util.distributed import World


def own_tokens(
    images: ImageSet,
    batches: Sequence[Tensor],
    backbone: Backbone,
    settings: Settings,
    world: World | None = None,
) -> Iterator[Tensor]:
    """For each batch of row numbers [N] its images, augmented anew, as far as no prompt is needed: [N, T, D].

    world: of several processes, each of which gets its own rows.
    """
    # With all of kornia, for which prediction need not wait.
    from protosteer.data.augment import Augmentation, augmented

    augment = Augmentation(backbone.preprocessing, settings.augmentation)
    for pictures in augmented(images, batches, augment, backbone.device, world):
        yield backbone.trunk(pictures, settings.prompt_from_layer - 1)


class SharedEncoder:
    """The leader's encoder: tokens of its own rows in, embeddings of the whole batch out.

    `views` must be what `rest` gets its tokens from: it is there that helpers are asked to take part.
    """

    def __init__(self, backbone: Backbone, world: World):
        self.backbone, self.world = backbone, world
        self.dim, self.depth, self.prompt_shape = backbone.dim, backbone.depth, backbone.prompt_shape
        self.counts: list[int] = []  # everyone's rows of the batch under way

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def views(self, images: ImageSet, batches: Sequence[Tensor], settings: Settings) -> Iterator[Tensor]:
        """See `method.training.Views`."""
        # As one tensor: pickle takes all rows of an epoch along with every batch that is a view of them.
        rows = torch.stack(list(batches))
        self.world.ask(_help_train, (self.backbone, images), self.device.type, rows, settings)
        tokens = own_tokens(images, batches, self.backbone, settings, self.world)
        for rows, own in zip(batches, tokens, strict=True):
            self.counts = _counts(self.world, len(rows))
            yield own

    def rest(self, tokens: Tensor, layers: int, prompt: Tensor | None = None) -> Tensor:
        spread = _Spread.apply(prompt, self.world)  # type: ignore[no-untyped-call]
        own = self.backbone.rest(tokens, layers, spread)
        return _Gathered.apply(own, self.counts, self.world)  # type: ignore[no-untyped-call]


def _counts(world: World, count: int) -> list[int]:
    return [share.stop - share.start for share in world.shares(count)]


class _Spread(torch.autograd.Function):
    """The leader's prompt for all; its gradient is the sum of everyone's."""

    @staticmethod
    def forward(ctx: Any, prompt: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.spread(prompt).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.world.summed(gradient), None


class _Gathered(torch.autograd.Function):
    """Everyone's embeddings; their gradients go back to where they came from."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], world: World) -> Tensor:
        ctx.counts, ctx.world = counts, world
        return world.gathered(own, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.world.scattered(gradient, ctx.counts), None, None


def _help_train(
    world: World,
    backbone: Backbone,
    images: ImageSet,
    device: str,
    batches: Tensor,
    settings: Settings,
) -> None:
    """A helper's share of an epoch, batches [B, N], in the order of `views`, `rest` and its way back."""
    backbone.to(world.device(device))
    blank = backbone.vit.cls_token.new_empty(prompt_shape(backbone, settings))
    if not _counts(world, batches.shape[1])[world.rank]:  # fewer rows than processes
        for _ in batches:
            world.told(lambda: None)
            world.summed(torch.zeros_like(world.spread(blank)))
        return
    for tokens in own_tokens(images, batches.unbind(), backbone, settings, world):
        prompt = world.spread(blank).requires_grad_()
        own = backbone.rest(tokens, settings.prompt_from_layer - 1, prompt)
        world.gathered(own, [])
        gradient = world.scattered(torch.empty_like(own), [])
        world.summed(*torch.autograd.grad(own, prompt, gradient))
