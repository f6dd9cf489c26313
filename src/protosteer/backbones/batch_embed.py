"""Sets of images through a backbone, batch by batch; by several processes, a batch each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from protosteer.backbones.prompting import Prompt
from protosteer.data.images import ImageSet
from protosteer.data.prefetch import prefetched
from protosteer.util.distributed import World, here

if TYPE_CHECKING:
    from protosteer.backbones.backbone import Backbone


def one_each(prompt: Prompt | None) -> TypeGuard[Prompt]:
    """Whether every image has a prompt of its own."""
    return prompt is not None and prompt.ndim == 4


def world_for(prompt: Prompt | None) -> World:
    """Who embeds: all processes, or this one alone where prompts would be more to send than images."""
    return here() if prompt is None or (isinstance(prompt, Tensor) and prompt.ndim == 3) else World()


@torch.no_grad()
def embed_batches(
    backbone: Backbone,
    images: ImageSet,
    prompt: Prompt | None,
    batches: Sequence[Sequence[int]],
    whole: bool,
    world: World,
) -> Iterator[Tensor]:
    """Float32 [n, D] on the CPU for batch after batch of rows; for a leader, one of each process at once.

    whole: all tokens [n, N, D].
    """
    compute: Callable[[Tensor, Any], Tensor] = backbone.tokens if whole else backbone.embed
    done = 0
    rounds = [batches[start : start + world.size] for start in range(0, len(batches), world.size)]
    own = batches[world.rank :: world.size]  # the last round may have none for some helpers
    for some, pixels in zip(rounds, prefetched(images, own, device=backbone.device), strict=False):
        prompts = prompt[done : done + len(pixels)] if one_each(prompt) else prompt
        part = compute(backbone.preprocessing(pixels, backbone.device), prompts).float()
        yield world.gathered(part, [len(batch) for batch in some]).cpu()
        done += len(pixels)


def help_embed(
    world: World,
    backbone: Backbone,
    images: ImageSet,
    device: str,
    prompt: Tensor | None,
    batches: Sequence[Sequence[int]],
    whole: bool,
) -> None:
    """A helper's share of `Backbone.embed_set`."""
    backbone.to(world.device(device))
    for _ in embed_batches(backbone, images, prompt, batches, whole, world):
        pass  # it is the leader who has the result
