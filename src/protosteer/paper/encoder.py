"""What the method asks of a backbone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Encoder(Protocol):
    """The frozen ViT f_theta as the method needs it; `backbones.Backbone` is one."""

    @property
    def dim(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def prompt_shape(self, length: int, deep: bool = True, from_layer: int = 1) -> tuple[int, int, int]: ...
    def rest(self, tokens: Tensor, layers: int, prompt: Tensor | None = None) -> Tensor:
        """Embeddings [B, D] from the tokens that came out of the first `layers` layers."""
