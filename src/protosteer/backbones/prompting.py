"""Kinds of prompts that `Backbone` accepts, and a ViT's outputs at every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from protosteer.paper.vit import ViT, insert_tokens


class CustomPrompt(Protocol):
    """A prompt that runs the ViT by itself; `methods.prefix_vit.Prefix` is one."""

    @property
    def requires_grad(self) -> bool:
        """Return True if gradients are needed."""

    @property
    def ndim(self) -> int:
        """Return 4 if every image has a prompt of its own, 3 if all share one."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: Any) -> CustomPrompt: ...
    def to(self, like: Tensor) -> CustomPrompt:
        """Move to the device and type of a tensor."""

    def embed_tokens(self, vit: ViT, x: Tensor, done: int) -> Tensor:
        """Embed [B, D] from the tokens x [B, N, D] after `done` layers."""


class TrainablePrompt(CustomPrompt, Protocol):
    """A custom prompt that may require gradients."""

    def map(self, change: Callable[[Tensor], Tensor]) -> CustomPrompt:
        """Change every tensor."""


Prompt = Tensor | CustomPrompt  # a tensor is [S, L, D] for all images, or [B, S, L, D], one each


def run_rest(vit: ViT, x: Tensor, done: int, prompt: Prompt | None) -> Tensor:
    """Embed [B, D] from the tokens x [B, N, D] after `done` layers, under any kind of prompt."""
    if prompt is None or isinstance(prompt, Tensor):
        return vit.embed_tokens(x, done, prompt)
    return prompt.embed_tokens(vit, x, done)


def all_tokens(vit: ViT, images: Tensor, prompt: Tensor | None = None) -> Tensor:
    """Return all tokens [B, N, D] after the last layer and the norm: class, prompt (L), registers, patches."""
    x, prompts = vit.enter_prompt(vit.embed_patches(images), 0, prompt)
    for block, tokens in zip(vit.blocks[:-1], prompts, strict=False):
        x = block(x, tokens)
    last_prompt = prompts[-1]
    x = vit.blocks[-1](x if last_prompt is None else insert_tokens(x, last_prompt))
    return vit.norm(x) if vit.config.pool == "token" else vit.fc_norm(x)
