"""`torch.compile`, block by block, so that equal layers are compiled once: the forward pass, a training step.

Compiling the whole ViT takes longer and has nothing more to fuse. The cache folder is new, so that the compile
time is that of a first use.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks.tools import Idea, NotHere, compare, normalised, prompts, step
from protosteer.backbones import Backbone
from protosteer.bench.subjects import vit_tiny
from protosteer.bench.timing import Ratio, Side
from protosteer.vit import ViT

IMAGES, NANO_IMAGES = 8, 256


def forward(vit: ViT, images: Tensor) -> Tensor:
    with torch.no_grad():
        return vit(images)


def compiled(vit: ViT) -> ViT:
    other = copy.deepcopy(vit)
    for block in other.blocks:
        block.compile(fullgraph=True)  # an error where torch would go on without having compiled
    return other


def run(repeats: int) -> list[Ratio]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        return [
            *_measured("", vit_tiny(), IMAGES, repeats),
            *_measured("_nano", Backbone.load("nano"), NANO_IMAGES, repeats, other_size=True),
        ]


def _measured(
    name: str, backbone: Backbone, count: int, repeats: int, other_size: bool = False
) -> list[Ratio]:
    plain = backbone.vit
    images, prompt = normalised(backbone, count), prompts(plain, 1)[0].requires_grad_()
    calls: dict[str, Callable[[ViT, Tensor], Tensor]] = {
        "forward": forward,
        "step": partial(step, prompt=prompt),
    }
    ratios = []
    for what, call in calls.items():
        torch.compiler.reset()
        other = compiled(plain)
        notes = [f"first call {_seconds(partial(call, other, images)):.1f} s"]
        if other_size and what == "forward":  # prediction has batches of all sizes
            notes.append(f"first call of another size {_seconds(partial(call, other, images[1:])):.1f} s")
        about = f"{backbone.name}, {what} of {count} images: plain / compiled"
        idea = Idea(f"compile_{what}{name}", about, partial(call, other, images), notes)
        ratios += compare(partial(call, plain, images), [idea], repeats, count)
    return ratios


def _seconds(side: Side) -> float:
    begin = time.perf_counter()
    try:
        side()
    except Exception as error:  # whatever is missing: compiler, headers, a backend for this platform
        raise NotHere(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    return time.perf_counter() - begin
