"""Embed sets of images batch by batch; several ranks embed a batch each at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from protosteer.backbones.prompting import Prompt
from protosteer.backbones.row_sharing import sharing_rows
from protosteer.data.images import ImageSet
from protosteer.data.prefetch import prefetched
from protosteer.util.distributed import ProcessGroup, process_group

if TYPE_CHECKING:
    from protosteer.backbones.backbone import Backbone


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
    done = 0
    rounds = [batches[start : start + group.size] for start in range(0, len(batches), group.size)]
    # A rank without a batch in the last round embeds the round's first one; `gather` ignores that.
    rows = [batch[group.rank if group.rank < len(batch) else 0] for batch in rounds]
    for batch, pixels in zip(rounds, prefetched(images, rows, device=backbone.device), strict=True):
        prompts = prompt[done : done + len(pixels)] if one_each(prompt) else prompt
        with sharing_rows(ProcessGroup()):  # ranks have a batch each
            part = compute(backbone.preprocessing(pixels, backbone.device), prompts).float()
        counts = [len(share) for share in batch]
        yield group.gather(part, counts + [0] * (group.size - len(batch))).cpu()
        done += len(pixels)
