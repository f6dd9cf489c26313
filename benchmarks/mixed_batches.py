"""Prediction's candidate passes: images grouped by prompt against full batches with one prompt per image.

A group shares its prompt's keys and values, but is as large as it happens to be: with many tasks, tiny. The third
form, `combined`, keeps the larger groups and mixes what remains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.tools import Idea, compare, normalised, prompts, shortened
from protosteer.backbones import Backbone
from protosteer.bench.subjects import vit_tiny
from protosteer.bench.timing import Ratio
from protosteer.vit import ViT

BATCH = 64
LARGE = 16  # images in a group that `combined` keeps
CANDIDATES = 2  # per image
DEPTH = 2  # layers of the ViT-Ti, for time's sake: prompts cost the same in each


@dataclass(frozen=True)
class Case:
    images: int
    tasks: int
    length: int


CASES = (Case(256, 10, 1), Case(256, 10, 50), Case(64, 100, 1), Case(64, 100, 50))


def pairs(images: int, tasks: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows and tasks, each [images * CANDIDATES], by image and then by task."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(images, tasks, generator=generator).topk(CANDIDATES).indices
    rows, owners = torch.zeros(images, tasks, dtype=torch.bool).scatter_(1, chosen, True).nonzero().unbind(1)
    return rows, owners


@torch.no_grad()
def grouped(vit: ViT, tokens: Tensor, all_prompts: Tensor, rows: Tensor, tasks: Tensor) -> Tensor:
    """[pairs, D]; tokens as `vit.trunk(images, 0)` gives them, all_prompts [T, S, L, D]."""
    embeddings = tokens.new_empty(len(rows), tokens.shape[2])
    for task in tasks.unique().tolist():
        for some in (tasks == task).nonzero()[:, 0].split(BATCH):
            embeddings[some] = vit.rest(tokens[rows[some]], 0, all_prompts[task])
    return embeddings


@torch.no_grad()
def mixed(vit: ViT, tokens: Tensor, all_prompts: Tensor, rows: Tensor, tasks: Tensor) -> Tensor:
    parts = torch.arange(len(rows)).split(BATCH)
    return torch.cat([vit.rest(tokens[rows[some]], 0, all_prompts[tasks[some]]) for some in parts])


@torch.no_grad()
def combined(vit: ViT, tokens: Tensor, all_prompts: Tensor, rows: Tensor, tasks: Tensor) -> Tensor:
    embeddings = tokens.new_empty(len(rows), tokens.shape[2])
    large = torch.bincount(tasks, minlength=len(all_prompts))[tasks] >= LARGE
    for form, those in ((grouped, large), (mixed, ~large)):
        if those.any():
            embeddings[those] = form(vit, tokens, all_prompts, rows[those], tasks[those])
    return embeddings


def run(repeats: int) -> list[Ratio]:
    tiny, nano = vit_tiny(), Backbone.load("nano")
    short = shortened(tiny.vit, DEPTH)
    subjects = (("", f"ViT-Ti of {DEPTH} layers", tiny, short), ("_nano", "nano", nano, nano.vit))
    return [ratio for subject in subjects for case in CASES for ratio in _measured(*subject, case, repeats)]


def _measured(name: str, about: str, backbone: Backbone, vit: ViT, case: Case, repeats: int) -> list[Ratio]:
    with torch.no_grad():
        tokens = vit.trunk(normalised(backbone, case.images), 0)
    rows, tasks = pairs(case.images, case.tasks)
    given = (vit, tokens, prompts(vit, case.tasks, case.length), rows, tasks)
    groups = len(tasks.unique())
    what = f"{about}, {case.images} images, {case.tasks} tasks, prompts of {case.length}: grouped"
    passes = f"{len(rows)} passes: {groups} groups, or {math.ceil(len(rows) / BATCH)} batches of {BATCH}"
    suffix = f"{name}_t{case.tasks}_l{case.length}"
    ideas = [Idea(f"mixed_batches{suffix}", f"{what} / mixed", partial(mixed, *given), [passes])]
    if name:  # on the ViT-Ti, where batches matter less, it would only take time
        ideas.append(Idea(f"combined_batches{suffix}", f"{what} / combined", partial(combined, *given)))
    return compare(partial(grouped, *given), ideas, repeats, len(rows))
