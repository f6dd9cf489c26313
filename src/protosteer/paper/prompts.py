"""Prompts P [S, L, D]: their shape, their initial values, and forward passes under one prompt per image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from protosteer.paper.vit import shared_layers
from protosteer.settings import Settings

# Maps rows [m] of images, and the task [m] whose prompt each gets (None: no prompt), to embeddings [m, D].
Embed = Callable[[Tensor, Tensor | None], Tensor]


class Encoder(Protocol):
    """The interface of the frozen ViT f_theta; `protosteer.Backbone` has it."""

    dim: int  # D
    depth: int

    @property
    def width(self) -> int:
        """Length of the embedding that `embed_tokens` returns: D, or more if it returns several layers."""

    @property
    def device(self) -> torch.device:
        """The device that prompts are trained on."""

    def prompt_shape(self, length: int, deep: bool = True, from_layer: int = 1) -> tuple[int, int, int]:
        """Return [S, L, D] of a prompt of `length` tokens; a deep one enters the layers from `from_layer` (1, ...) on."""

    def embed_tokens(self, tokens: Tensor, layers: int, prompt: Tensor | None = None) -> Tensor:
        """Embed [B, D] from the tokens [B, N, D] after the first `layers` layers."""


def prompt_shape(encoder: Encoder, settings: Settings) -> tuple[int, int, int]:
    """Return the shape [S, L, D] of prompts under these settings."""
    return encoder.prompt_shape(settings.prompt_length, settings.prompt_kind == "deep", settings.prompt_from_layer)


def initial_prompt(
    encoder: Encoder, settings: Settings, start: Tensor | None, generator: torch.Generator | None = None
) -> Tensor:
    """Return the prompt [S, L, D] that training starts from.

    It is the previous task's prompt `start` if the settings allow that and shapes agree. Otherwise it is zero or random.
    Equal tokens get equal gradients and stay equal. So by default a first prompt of several tokens is random.
    """
    shape, kind = prompt_shape(encoder, settings), settings.prompt_start
    if start is not None and start.shape == shape and kind in ("previous", "zero-then-previous"):
        return start.detach().clone()
    if kind == "random" or (kind == "previous" and settings.prompt_length > 1):
        return nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=generator)
    return torch.zeros(shape)


def trunk_layers(prompts: Sequence[Tensor | None], depth: int) -> int:
    """Return how many first layers no prompt enters; their output is computed once for the query and all prompts."""
    return min((shared_layers(prompt, depth) for prompt in prompts if prompt is not None), default=0)


def prompted_forward(
    encoder: Encoder, prompts: Sequence[Tensor | None], tokens: Tensor, layers: int, batch_size: int
) -> Embed:
    """Return the `Embed` of B images, given as tokens [B, N, D] after the first `layers` layers: see `trunk_layers`."""

    def embed(rows: Tensor, tasks: Tensor | None) -> Tensor:
        embeddings = torch.empty(len(rows), encoder.width)
        groups = [torch.arange(len(rows))] if tasks is None else _groups_by_shape(prompts, tasks)
        for part in (part for group in groups for part in group.split(batch_size)):
            stacked = None if tasks is None else torch.stack([prompts[t] for t in tasks[part].tolist()])
            with torch.no_grad():
                embeddings[part] = encoder.embed_tokens(tokens[rows[part]], layers, stacked).float().cpu()
        return embeddings

    return embed


def _groups_by_shape(prompts: Sequence[Tensor | None], tasks: Tensor) -> list[Tensor]:
    """Return groups of positions in `tasks` [m] whose prompts have the same shape, so that they can be stacked."""
    groups: dict[torch.Size, list[int]] = {}
    for t in tasks.unique().tolist():
        prompt = prompts[t]
        assert prompt is not None
        groups.setdefault(prompt.shape, []).append(t)
    return [torch.isin(tasks, torch.tensor(group)).nonzero()[:, 0] for group in groups.values()]
