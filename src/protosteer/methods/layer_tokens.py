"""Pooled tokens of several layers, in place of the embedding: `Backbone.embed` accepts `LayerTokens` as a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protosteer.paper.vit import ViT


@dataclass(frozen=True)
class LayerTokens:
    """Read the pooled tokens after each of the last layers, [B, layers * D], under a prompt [S, L, D] or none."""

    layers: int
    prompt: Tensor | None = None

    ndim = 3  # as a prompt has it: all images share one
    requires_grad = False

    def __len__(self) -> int:
        return 1

    def __getitem__(self, rows: Any) -> LayerTokens:
        return self

    def to(self, tensor: Tensor) -> LayerTokens:
        """Return the tokens on the device and in the type of a tensor."""
        return LayerTokens(self.layers, None if self.prompt is None else self.prompt.to(tensor))

    def embed_tokens(self, vit: ViT, x: Tensor, done: int) -> Tensor:
        """Run the layers after the first `done` on tokens x [B, N, D], and return those of the last, side by side.

        Of a layer, it is the class token, or the patch mean with mean pooling; the final norm is not applied.
        """
        x, prompts = vit.enter_prompt(x, done, self.prompt)
        tokens = []
        for i in range(done, vit.config.depth):
            x = vit.blocks[i](x, prompts[i], vit.queries(i))
            tokens.append(x[:, 0] if vit.config.pool == "token" else x[:, -vit.config.patches :].mean(dim=1))
        return torch.cat(tokens[-self.layers :], dim=1)
