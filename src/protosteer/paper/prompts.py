"""Prompts P [S, L, D]: their shape, how training starts them, and images embedded under prompts of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from protosteer.paper.vit import shared_layers
from protosteer.settings import Settings

# Embeds images by their rows [m], each under the prompt of a task, by number [m], or under none: -> [m, D].
Embed = Callable[[Tensor, Tensor | None], Tensor]


class Encoder(Protocol):
    """What the method asks of the frozen ViT f_theta; `protosteer.Backbone` has it."""

    dim: int  # D
    depth: int

    @property
    def width(self) -> int:
        """How many numbers `rest` gives of an image: D."""

    @property
    def device(self) -> torch.device:
        """Where prompts are trained."""

    def prompt_shape(self, length: int, deep: bool = True, from_layer: int = 1) -> tuple[int, int, int]:
        """[S, L, D] of a prompt of `length` tokens, a deep one in the layers from `from_layer` on."""

    def rest(self, tokens: Tensor, layers: int, prompt: Tensor | None = None) -> Tensor:
        """Embed [B, D] from the tokens [B, N, D] after the first `layers` layers."""


def prompt_shape(encoder: Encoder, settings: Settings) -> tuple[int, int, int]:
    """[S, L, D] of the prompts that these settings ask for."""
    return encoder.prompt_shape(settings.prompt_length, settings.prompt_kind == "deep", settings.prompt_from_layer)


def initial_prompt(
    encoder: Encoder, settings: Settings, start: Tensor | None, generator: torch.Generator | None = None
) -> Tensor:
    """[S, L, D]: the previous task's prompt `start` if it has this shape, zero, or small numbers by the generator.

    Equal tokens get equal gradients and stay equal for ever, so a prompt of several tokens does not start at zero,
    unless the settings ask for it.
    """
    shape, kind = prompt_shape(encoder, settings), settings.prompt_start
    if start is not None and start.shape == shape and kind in ("previous", "zero-then-previous"):
        return start.detach().clone()
    if kind == "random" or (kind == "previous" and settings.prompt_length > 1):
        return nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=generator)
    return torch.zeros(shape)


def trunk_layers(prompts: Sequence[Tensor | None], depth: int) -> int:
    """How many first layers no prompt enters: one run of them serves the query and all prompts."""
    return min((shared_layers(prompt, depth) for prompt in prompts if prompt is not None), default=0)


def prompted_forward(
    encoder: Encoder, prompts: Sequence[Tensor | None], tokens: Tensor, layers: int, batch_size: int
) -> Embed:
    """Make the `Embed` of B images, given as tokens [B, N, D] that have left `layers` layers: see `trunk_layers`."""

    def embed(rows: Tensor, tasks: Tensor | None) -> Tensor:
        embeddings = torch.empty(len(rows), encoder.width)
        groups = [torch.arange(len(rows))] if tasks is None else _same_shape(prompts, tasks)
        for part in (part for group in groups for part in group.split(batch_size)):
            own = None if tasks is None else torch.stack([prompts[t] for t in tasks[part].tolist()])
            with torch.no_grad():
                embeddings[part] = encoder.rest(tokens[rows[part]], layers, own).float().cpu()
        return embeddings

    return embed


def _same_shape(prompts: Sequence[Tensor | None], tasks: Tensor) -> list[Tensor]:
    """Positions in `tasks` [m], grouped so that the prompts of a group can be stacked."""
    groups: dict[torch.Size, list[int]] = {}
    for t in tasks.unique().tolist():
        prompt = prompts[t]
        assert prompt is not None
        groups.setdefault(prompt.shape, []).append(t)
    return [torch.isin(tasks, torch.tensor(group)).nonzero()[:, 0] for group in groups.values()]
