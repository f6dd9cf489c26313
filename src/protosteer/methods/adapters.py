"""Bottleneck adapters beside the MLPs of a frozen ViT, after AdaptFormer (Chen et al., NeurIPS 2022).

As in the code of APER, EASE and RanPAC, an adapter reads the residual stream before the MLP's norm. Their dropout of
0.1 inside the adapter is omitted: under torchrun every process embeds its own rows, and would draw other numbers than one.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.paper.vit import Block
from protosteer.util.seeded import seeded


class Adapter(nn.Module):
    """relu(x A + a) B + b over tokens of dimension `dim`, with a hidden `width`; its output starts at zero."""

    def __init__(self, dim: int, width: int, generator: torch.Generator | None = None):
        super().__init__()
        self.down = seeded(lambda: nn.Linear(dim, width), generator)
        self.up = seeded(lambda: nn.Linear(width, dim), generator)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens [B, N, D]."""
        return self.up(F.relu(self.down(x)))


class AdaptedBlock(Block):
    """A layer of the ViT plus `scale` times an adapter that reads the residual stream, beside norm and MLP."""

    def __init__(self, block: Block, adapter: nn.Module, scale: float):
        nn.Module.__init__(self)
        for name, module in block.named_children():
            self.add_module(name, module)
        self.adapter = adapter
        self.scale = scale

    def feed_forward(self, x: Tensor) -> Tensor:
        """Apply MLP and adapter to tokens [B, N, D]."""
        return super().feed_forward(x) + self.scale * self.adapter(x)


def new_adapters(backbone: Backbone, width: int, generator: torch.Generator) -> nn.ModuleList:
    """Create one adapter per layer of the backbone."""
    adapters = (Adapter(backbone.dim, width, generator) for _ in range(backbone.depth))
    return nn.ModuleList(adapters).to(backbone.device)


def with_adapters(backbone: Backbone, adapters: nn.ModuleList, scale: float, trainable: bool) -> Backbone:
    """Return the backbone with an adapter in every layer, as a new backbone.

    Both share all other weights, so many adapted backbones take little memory. Only the adapters can be trained, and only
    if it is `trainable`.
    """
    memo = {id(parameter): parameter for parameter in backbone.vit.parameters()}
    vit = copy.deepcopy(backbone.vit, memo)
    adapters.requires_grad_(trainable)
    pairs = zip(vit.blocks, adapters, strict=True)
    vit.blocks = nn.ModuleList(AdaptedBlock(cast(Block, block), adapter, scale) for block, adapter in pairs)
    adapted_backbone = Backbone(backbone.name, vit, backbone.preprocessing, precision=backbone.precision)
    adapted_backbone.trainable = trainable
    return adapted_backbone
