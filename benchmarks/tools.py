"""What the trials share: one plain form against some ideas, and the backbones they are tried on."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.bench.subjects import pictures
from protosteer.bench.timing import Ratio, Side, interleaved
from protosteer.vit import ViT

TARGET = 1.0  # above it an idea pays
LEAST_SECONDS = 0.3  # a repeat that is shorter says little


class NotHere(Exception):
    """An idea cannot be measured on this machine; one line says why."""


@dataclass(frozen=True)
class Idea:
    """Another way to do what the plain form does."""

    name: str
    about: str
    side: Side
    notes: list[str] = field(default_factory=list)


def compare(plain: Side, ideas: Sequence[Idea], repeats: int, images: int) -> list[Ratio]:
    """Plain time / idea's time for each idea, with the milliseconds per image of both."""
    sides = {"plain": plain} | {idea.name: idea.side for idea in ideas}
    times = interleaved(sides, repeats=1, warm_up=False)
    loops = math.ceil(LEAST_SECONDS / min(seconds[0] for seconds in times.values()))
    if loops == 1:  # so long that warming up does not matter: the first repeat counts
        more = interleaved(sides, repeats - 1, warm_up=False)
        times = {name: times[name] + more[name] for name in sides}
    else:
        looped = {name: partial(_loop, side, loops) for name, side in sides.items()}
        times = interleaved(looped, repeats, warm_up=False)
    return [
        ratio(idea.name, idea.about, times["plain"], times[idea.name], images * loops, idea.notes)
        for idea in ideas
    ]


def _loop(side: Side, loops: int) -> None:
    for _ in range(loops):
        side()


def ratio(
    name: str,
    about: str,
    plain: Sequence[float],
    idea: Sequence[float],
    images: int,
    notes: Sequence[str] = (),
) -> Ratio:
    """From the seconds of each repeat."""
    each = [1000 * median(side) / images for side in (plain, idea)]
    rates = f"{each[0]:.3g} against {each[1]:.3g} ms an image"
    return Ratio.of(name, about, plain, idea, TARGET, [rates, *notes])


def shortened(vit: ViT, depth: int) -> ViT:
    """The first layers alone, for what costs the same in every layer. It pools the mean: all layers are whole."""
    short = copy.deepcopy(vit)
    short.blocks = short.blocks[:depth]
    short.fc_norm = short.norm if vit.config.pool == "token" else short.fc_norm
    short.config = dataclasses.replace(vit.config, depth=depth, pool="mean")
    return short


def normalised(backbone: Backbone, count: int) -> Tensor:
    """[count, 3, s, s], as the ViT takes them."""
    return backbone.preprocessing(pictures(backbone, count))


def step(vit: ViT, images: Tensor, prompt: Tensor) -> Tensor:
    """A training step as far as the ViT goes: the prompt's gradient behind a fixed readout, without neck and loss."""
    readout = torch.linspace(-1, 1, vit.config.dim)
    return torch.autograd.grad((vit(images, prompt) @ readout).sum(), prompt)[0]


def prompts(vit: ViT, count: int, length: int = 1, seed: int = 0) -> Tensor:
    """[count, S, L, D] small random numbers, deep from layer 1 on."""
    shape = (count, vit.config.depth, length, vit.config.dim)
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
