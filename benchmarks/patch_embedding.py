"""The patch embedding's convolution in channels-last order, and as one matrix product."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tools import Idea, compare, normalised
from protosteer.backbones import Backbone
from protosteer.bench.subjects import vit_tiny
from protosteer.bench.timing import Ratio, interleaved
from protosteer.vit import PatchEmbed, ViT

IMAGES, NANO_IMAGES = 64, 256


class ChannelsLast(nn.Module):
    """Weights in channels-last order once, images in each call, because preprocessing gives planes."""

    def __init__(self, plain: PatchEmbed):
        super().__init__()
        self.proj = copy.deepcopy(plain.proj)
        self.proj.weight.data = self.proj.weight.contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        out = self.proj(images.contiguous(memory_format=torch.channels_last))
        return out.flatten(2).transpose(1, 2)


class Unfolded(nn.Module):
    """Patches do not overlap, so the convolution is a product of [B * patches, 3 p²] and [3 p², D]."""

    def __init__(self, plain: PatchEmbed):
        super().__init__()
        self.proj = plain.proj

    def forward(self, images: Tensor) -> Tensor:
        size = self.proj.stride[0]
        pieces = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # [B, 3, rows, p, columns, p]
        patches = pieces.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def with_embedding(vit: ViT, kind: type[ChannelsLast] | type[Unfolded]) -> ViT:
    other = copy.deepcopy(vit)
    other.patch_embed = kind(vit.patch_embed)  # type: ignore[assignment]
    return other


@torch.no_grad()
def tokens(vit: ViT, images: Tensor) -> Tensor:
    return vit.embed_patches(images)


def run(repeats: int) -> list[Ratio]:
    tiny, nano = vit_tiny(), Backbone.load("nano")
    return [*_measured("", tiny, IMAGES, repeats), *_measured("_nano", nano, NANO_IMAGES, repeats)]


def _measured(name: str, backbone: Backbone, count: int, repeats: int) -> list[Ratio]:
    vit, images = backbone.vit, normalised(backbone, count)
    last, unfolded = with_embedding(vit, ChannelsLast), with_embedding(vit, Unfolded)
    share = _share(vit, images[: count // 4])
    about = f"{backbone.name}, pixels to tokens: convolution / "
    ideas = [
        Idea(
            f"channels_last{name}",
            about + "channels-last, conversion of images included",
            partial(tokens, last, images),
            [f"the convolution's tokens are {100 * share:.1f} % of a forward pass"],
        ),
        Idea(f"unfold{name}", about + "one matrix product", partial(tokens, unfolded, images)),
    ]
    return compare(partial(tokens, vit, images), ideas, repeats, count)


@torch.no_grad()
def _share(vit: ViT, images: Tensor) -> float:
    """Part of a forward pass that ends with the tokens."""
    times = interleaved({"tokens": partial(tokens, vit, images), "all": partial(vit, images)}, repeats=1)
    return times["tokens"][0] / times["all"][0]
