"""Embeddings of several layers from one forward pass: class tokens and patch means, side by side.

Later layers separate the classes of pre-training best, earlier ones textures and parts. Each of the S feature spaces is
D wide. The first one is the output of the backbone; the others are tokens of earlier layers after a plain layer norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.paper.vit import ViT, ViTConfig

# Layers before the last one, of 12, for tokens that are pooled as the output is, and for the other kind.
SAME_POOLING_OFFSETS = (0, 1, 2, 4)
OTHER_POOLING_OFFSETS = (2, 5)
MIN_DEPTH_OTHER_POOLING = 6  # in shallower ViTs, tokens that are not pooled carry no summary of the image


@dataclass(frozen=True)
class FeatureSpace:
    """The layer and pooling of one feature space."""

    layer: int  # 1 to depth
    pool: str  # "token": the class token; "mean": the patch mean


def feature_spaces(config: ViTConfig) -> tuple[FeatureSpace, ...]:
    """Return the feature spaces of a ViT, the output first, chosen by its depth alone."""
    layers = [config.depth - round(offset * config.depth / 12) for offset in SAME_POOLING_OFFSETS]
    # In the last layer only the pooled tokens are computed.
    offsets = OTHER_POOLING_OFFSETS if config.depth >= MIN_DEPTH_OTHER_POOLING else ()
    other_layers = [min(config.depth - 1, config.depth - round(offset * config.depth / 12)) for offset in offsets]
    pools = (config.pool, "mean" if config.pool == "token" else "token")
    spaces = [FeatureSpace(n, pool) for pool, part in zip(pools, (layers, other_layers), strict=True) for n in part]
    return tuple(dict.fromkeys(space for space in spaces if space.layer >= 1))


def layer_features(vit: ViT, x: Tensor, start: int, prompt: Tensor | None = None) -> Tensor:
    """Embed as `ViT.embed_tokens` does, in all feature spaces: [B, S * D], the output first.

    Args:
        vit: The ViT.
        x: Tokens [B, N, D] after the first `start` layers, fewer than any feature space needs.
        start: Number of these layers.
        prompt: As in `ViT.embed_tokens`.
    """
    _, *earlier_spaces = feature_spaces(vit.config)
    pooled: dict[FeatureSpace, Tensor] = {}
    x, prompts = vit.enter_prompt(x, start, prompt)
    for i in range(start, vit.config.depth):
        x = vit.blocks[i](x, prompts[i], vit.queries(i))
        for space in (space for space in earlier_spaces if space.layer == i + 1):
            token = x[:, 0] if space.pool == "token" else x[:, -vit.config.patches :].mean(dim=1)
            pooled[space] = F.layer_norm(token.float(), token.shape[-1:])
    return torch.cat([vit.pool(x).float(), *(pooled[space] for space in earlier_spaces)], dim=1)


def max_trunk(config: ViTConfig) -> int:
    """Return the greatest `start` of `layer_features`: the layers before the earliest feature space."""
    return min(space.layer for space in feature_spaces(config)) - 1
