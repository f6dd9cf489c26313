"""Embedding the same images: one process with two threads against two processes with one thread each.

Start-up is not counted: all processes have embedded once and wait before they are told to begin.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from benchmarks.tools import normalised, ratio
from benchmarks.workers import Job, Worker, together
from protosteer.backbones import Backbone
from protosteer.bench.subjects import vit_tiny
from protosteer.bench.timing import Ratio

# backbone, images in all, batch size
CASES = (("", "vit_tiny", 32, 16), ("_nano", "nano", 1024, 64))


def embedding(name: str, images: int, batch: int, threads: int) -> Job:
    """A job for a worker: `images` forward passes without gradient."""
    torch.set_num_threads(threads)
    backbone = vit_tiny() if name == "vit_tiny" else Backbone.load(name)
    some = normalised(backbone, batch)
    return lambda: [backbone.embed(some) for _ in range(images // batch)]


def run(repeats: int) -> list[Ratio]:
    ratios = []
    for suffix, name, images, batch in CASES:
        about = (
            f"{name}, {images} images in batches of {batch}: 1 process with 2 threads / 2 processes with 1"
        )
        one, two = _times(name, images, batch, repeats)
        ratios.append(ratio(f"processes{suffix}", about, one, two, images))
    return ratios


def _times(name: str, images: int, batch: int, repeats: int) -> tuple[list[float], list[float]]:
    with ExitStack() as stack:
        single = [stack.enter_context(Worker(embedding, name, images, batch, 2))]
        pair = [stack.enter_context(Worker(embedding, name, images // 2, batch, 1)) for _ in range(2)]
        times = [(together(single), together(pair)) for _ in range(repeats)]
    return [one for one, _ in times], [two for _, two in times]
