"""Share the rows of a batch among ranks within a training: each rank computes its own rows of `Backbone.embed`.

Every rank runs the same program on the same batch, and gets the embeddings of all rows. Whatever a loss does with them
is computed by every rank as by a single process, so any loss is exact. Backwards, each rank propagates the gradient of
its own rows; those of weights and prompts are summed where they enter `embed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.func import functional_call

from protosteer.backbones.prompting import Prompt, TrainablePrompt
from protosteer.util.distributed import GatherRows, ProcessGroup, SumGradients

_group = ProcessGroup()


@contextmanager
def sharing_rows(group: ProcessGroup) -> Iterator[None]:
    """Let the ranks of a group share the rows of every batch that is embedded in the block."""
    global _group
    before, _group = _group, group
    try:
        yield
    finally:
        _group = before


def share_rows(
    vit: nn.Module, images: Tensor, prompt: Prompt | None, compute: Callable[[Tensor, Any], Tensor]
) -> Tensor:
    """Compute a function of images [B, 3, H, W] and a prompt by the ViT, of which each rank does its rows: [B, ...]."""
    group = _group
    if group.size == 1:
        return compute(images, prompt)
    own, shares = group.share(len(images)), group.shares(len(images))
    if prompt is not None:
        if isinstance(prompt, Tensor):
            prompt = _summed(prompt, group)
        elif prompt.requires_grad:
            prompt = cast(TrainablePrompt, prompt).map(lambda tensor: _summed(tensor, group))
        prompt = prompt[own] if prompt.ndim == 4 else prompt
    trained = {f"vit.{name}": _summed(p, group) for name, p in vit.named_parameters() if p.requires_grad}
    part = functional_call(_Computed(vit, compute), trained, (images[own], prompt))
    return GatherRows.apply(part, shares, group)  # type: ignore[no-untyped-call]


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    summed: Tensor = SumGradients.apply(tensor, group) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return summed


class _Computed(nn.Module):
    """A function of the ViT as a module, so that `functional_call` can put other weights into the ViT."""

    def __init__(self, vit: nn.Module, compute: Callable[[Tensor, Any], Tensor]):
        super().__init__()
        self.vit, self.compute = vit, compute

    def forward(self, images: Tensor, prompt: Prompt | None) -> Tensor:
        return self.compute(images, prompt)
