"""Share images among ranks: the rows of each batch within a training, whole batches where a set is embedded.

In a training each rank computes its own rows of `Backbone.embed`. Every rank runs the same program on the same batch,
and gets the embeddings of all rows. Every rank computes the loss as a single process would, so any loss is exact. In the
backward pass each rank propagates the gradient of its own rows. Gradients of weights and prompts are summed where they
enter `embed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from protosteer.backbones.prompting import Prompt, TrainablePrompt
from protosteer.data.images import ImageSet
from protosteer.data.prefetch import prefetched
from protosteer.util.distributed import GatherRows, ProcessGroup, SumGradients, process_group

if TYPE_CHECKING:
    from protosteer.backbones.backbone import Backbone

_group = ProcessGroup()


@contextmanager
def sharing_rows(group: ProcessGroup) -> Iterator[None]:
    """Let the ranks of a group share the rows of every batch that is embedded in the block."""
    global _group
    outer_group, _group = _group, group
    try:
        yield
    finally:
        _group = outer_group


def share_rows(
    vit: nn.Module, images: Tensor, prompt: Prompt | None, compute: Callable[[Tensor, Any], Tensor]
) -> Tensor:
    """Compute a function of images [B, 3, H, W] and a prompt by the ViT; each rank computes its rows: [B, ...]."""
    group = _group
    if group.size == 1:
        return compute(images, prompt)
    rank_rows, shares = group.share(len(images)), group.shares(len(images))
    if prompt is not None:
        if isinstance(prompt, Tensor):
            prompt = _sum_gradients(prompt, group)
        elif prompt.requires_grad:
            prompt = cast(TrainablePrompt, prompt).map(lambda tensor: _sum_gradients(tensor, group))
        prompt = prompt[rank_rows] if prompt.ndim == 4 else prompt
    weights = {f"vit.{name}": _sum_gradients(p, group) for name, p in vit.named_parameters() if p.requires_grad}
    part = functional_call(_Compute(vit, compute), weights, (images[rank_rows], prompt))
    return GatherRows.apply(part, shares, group)  # type: ignore[no-untyped-call]


def _sum_gradients(tensor: Tensor, group: ProcessGroup) -> Tensor:
    summed: Tensor = SumGradients.apply(tensor, group) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return summed


class _Compute(nn.Module):
    """A function of the ViT as a module, so that `functional_call` can put other weights into the ViT."""

    def __init__(self, vit: nn.Module, compute: Callable[[Tensor, Any], Tensor]):
        super().__init__()
        self.vit, self.compute = vit, compute

    def forward(self, images: Tensor, prompt: Prompt | None) -> Tensor:
        return self.compute(images, prompt)


def one_each(prompt: Prompt | None) -> TypeGuard[Prompt]:
    """Return True if every image has a prompt of its own."""
    return prompt is not None and prompt.ndim == 4


def group_for(prompt: Prompt | None) -> ProcessGroup:
    """Return all ranks, or this one alone if images have prompts of their own."""
    shared = prompt is None or (isinstance(prompt, Tensor) and prompt.ndim == 3)
    return process_group() if shared else ProcessGroup()


@torch.no_grad()
def embed_batches(
    backbone: Backbone,
    images: ImageSet,
    prompt: Prompt | None,
    batches: Sequence[Sequence[int]],
    whole: bool,
    group: ProcessGroup,
) -> Iterator[Tensor]:
    """Embed batches of rows, one on each rank at a time; yield float32 [n, D] on the CPU, in order."""
    compute: Callable[[Tensor, Any], Tensor] = backbone.tokens if whole else backbone.embed
    count = 0
    rounds = [batches[start : start + group.size] for start in range(0, len(batches), group.size)]
    # A rank without a batch in the last round embeds the round's first one; `gather` ignores that.
    rows = [batch[group.rank if group.rank < len(batch) else 0] for batch in rounds]
    for batch, pixels in zip(rounds, prefetched(images, rows, device=backbone.device), strict=True):
        prompts = prompt[count : count + len(pixels)] if one_each(prompt) else prompt
        with sharing_rows(ProcessGroup()):  # each rank has its own batch
            part = compute(backbone.preprocessing(pixels, backbone.device), prompts).float()
        counts = [len(share) for share in batch]
        yield group.gather(part, counts + [0] * (group.size - len(batch))).cpu()
        count += len(pixels)
