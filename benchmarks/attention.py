"""Attention: softmax(Q K^T) V written out against `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tools import Idea, compare
from protosteer.bench.timing import Ratio

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# images, tokens, heads, width of a head: ViT-Ti/16 at 224 px, and nano
CASES = (("", "ViT-Ti", 16, 197, 3, 64), ("_nano", "nano", 256, 17, 4, 32))


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, heads, N, d] each."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return scores.softmax(dim=-1) @ v


@torch.no_grad()
def forward(attend: Attend, projected: Tensor, heads: int) -> Tensor:
    """[B, N, D] from the joint projection [B, N, 3 * D], as the ViT's layers have it."""
    return _attended(attend, projected, heads)


def gradient(attend: Attend, projected: Tensor, heads: int) -> Tensor:
    """Of the sum of squared outputs, for the joint projection."""
    leaf = projected.detach().requires_grad_()
    return torch.autograd.grad(_attended(attend, leaf, heads).square().sum(), leaf)[0]


def _attended(attend: Attend, projected: Tensor, heads: int) -> Tensor:
    q, k, v = projected.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v).transpose(1, 2).flatten(2)


def run(repeats: int) -> list[Ratio]:
    ratios = []
    for name, about, images, tokens, heads, width in CASES:
        projected = torch.randn(images, tokens, 3 * heads * width)
        for suffix, what, work in (
            ("", "forward and backward", gradient),
            ("_forward", "forward without gradient", forward),
        ):
            idea = Idea(
                f"attention{suffix}{name}",
                f"{about}, one layer, {what}: written out / scaled_dot_product_attention",
                partial(work, F.scaled_dot_product_attention, projected, heads),
            )
            ratios += compare(partial(work, explicit, projected, heads), [idea], repeats, images)
    return ratios
