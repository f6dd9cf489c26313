"""What the coarse pass and all candidate passes of an image have in common when prompts begin in layer 1.

`shared_patches`: preprocessing and patch embedding, done once, against every pass from pixels.
`shared_layer1_kv`: on top of that, queries, keys and values of the image tokens in layer 1; only the prompt's
own keys and values differ there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tools import Idea, compare, prompts
from protosteer.backbones import Backbone
from protosteer.bench.subjects import pictures, vit_tiny
from protosteer.bench.timing import Ratio
from protosteer.vit import Attention, Block, ViT

IMAGES, NANO_IMAGES = 8, 256
CANDIDATES = 2  # besides the coarse pass


@torch.no_grad()
def from_pixels(backbone: Backbone, pixels: Tensor, some: Sequence[Tensor | None]) -> list[Tensor]:
    """One embedding [B, D] per prompt (None: the coarse pass), each from uint8 pixels."""
    return [backbone.vit(backbone.preprocessing(pixels), prompt) for prompt in some]


@torch.no_grad()
def from_patches(backbone: Backbone, pixels: Tensor, some: Sequence[Tensor | None]) -> list[Tensor]:
    tokens = backbone.vit.trunk(backbone.preprocessing(pixels), 0)
    return [backbone.vit.rest(tokens, 0, prompt) for prompt in some]


@torch.no_grad()
def from_tokens(vit: ViT, tokens: Tensor, some: Sequence[Tensor | None]) -> list[Tensor]:
    return [vit.rest(tokens, 0, prompt) for prompt in some]


@torch.no_grad()
def from_layer1(vit: ViT, tokens: Tensor, some: Sequence[Tensor | None]) -> list[Tensor]:
    first = FirstLayer.of(vit, tokens)
    return [
        vit.rest(
            first.finish(None if prompt is None else prompt[0]), 1, None if prompt is None else prompt[1:]
        )
        for prompt in some
    ]


@dataclass(frozen=True)
class FirstLayer:
    """Layer 1 as far as no prompt is needed; for ViTs of more than two layers and deep prompts from layer 1."""

    block: Block
    tokens: Tensor  # [B, N, D]
    q: Tensor  # [B, heads, N, D / heads], as k and v
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, vit: ViT, tokens: Tensor) -> FirstLayer:
        block = vit.blocks[0]
        assert isinstance(block, Block)
        q, k, v = split_heads(block.attn.qkv(block.norm1(tokens)), block.attn, 3)
        return cls(block, tokens, q, k, v)

    def finish(self, prompt: Tensor | None) -> Tensor:
        """Tokens [B, N, D] after layer 1 under its prompt [L, D]."""
        attention, k, v = self.block.attn, self.k, self.v
        if prompt is not None:
            dim = prompt.shape[1]
            bias = None if attention.qkv.bias is None else attention.qkv.bias[dim:]
            projected = F.linear(self.block.norm1(prompt), attention.qkv.weight[dim:], bias)
            pk, pv = split_heads(projected.unsqueeze(0), attention, 2)
            k = torch.cat([k, pk.expand(len(k), -1, -1, -1)], dim=2)
            v = torch.cat([v, pv.expand(len(v), -1, -1, -1)], dim=2)
        out = F.scaled_dot_product_attention(self.q, k, v).transpose(1, 2).flatten(2)
        x = self.tokens + self.block.ls1(attention.proj(out))
        return x + self.block.ls2(self.block.mlp(self.block.norm2(x)))


def split_heads(x: Tensor, attention: Attention, parts: int) -> tuple[Tensor, ...]:
    """[B, N, parts * D] -> `parts` tensors [B, heads, N, D / heads]."""
    return x.unflatten(2, (parts, attention.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def run_patches(repeats: int) -> list[Ratio]:
    tiny, nano = vit_tiny(), Backbone.load("nano")
    cases = (("", tiny, IMAGES, 224), ("_from_32px", tiny, IMAGES, 32), ("_nano", nano, NANO_IMAGES, 32))
    ratios = []
    for name, backbone, count, size in cases:
        pixels = F.interpolate(pictures(backbone, count), size=size)
        given = (backbone, pixels, [None, *prompts(backbone.vit, CANDIDATES)])
        idea = Idea(
            f"shared_patches{name}",
            f"{backbone.name}, pixels of {size} px, {1 + CANDIDATES} passes: each from pixels / from shared tokens",
            partial(from_patches, *given),
        )
        ratios += compare(partial(from_pixels, *given), [idea], repeats, count)
    return ratios


def run_layer1(repeats: int) -> list[Ratio]:
    ratios = []
    for name, backbone, count in (
        ("", vit_tiny(), IMAGES),
        ("_nano", Backbone.load("nano"), NANO_IMAGES),
    ):
        vit = backbone.vit
        with torch.no_grad():
            tokens = vit.trunk(backbone.preprocessing(pictures(backbone, count)), 0)
        given = (vit, tokens, [None, *prompts(vit, CANDIDATES)])
        idea = Idea(
            f"shared_layer1_kv{name}",
            f"{backbone.name}, {1 + CANDIDATES} passes from shared tokens: plain / layer-1 q, k, v computed once",
            partial(from_layer1, *given),
        )
        ratios += compare(partial(from_tokens, *given), [idea], repeats, count)
    return ratios
