"""Embedding the same images: one process with two threads against two processes with one thread each.

Start-up is not counted: all processes have embedded once and wait until they are told to begin.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from benchmarks.tools import normalised, ratio
from benchmarks.workers import Job, Worker, own_times, together
from protosteer.backbones import Backbone
from protosteer.bench.subjects import vit_tiny
from protosteer.bench.timing import Ratio

# backbone: images in all, batch size
CASES = {"vit_tiny": (32, 16), "nano": (1024, 64)}


def embedding(threads: int) -> Job:
    """A job for a worker: forward passes of a number of images without gradient, with one of the backbones."""
    torch.set_num_threads(threads)
    backbones = {"vit_tiny": vit_tiny(), "nano": Backbone.load("nano")}
    batches = {name: normalised(backbones[name], batch) for name, (_, batch) in CASES.items()}

    def embed(name: str, images: int) -> list[Tensor]:
        return [backbones[name].embed(batches[name]) for _ in range(images // CASES[name][1])]

    return embed


def run(repeats: int) -> list[Ratio]:
    with ExitStack() as stack:
        single = [stack.enter_context(Worker(embedding, 2))]
        pair = [stack.enter_context(Worker(embedding, 1)) for _ in range(2)]
        ratios = []
        for name, (images, batch) in CASES.items():
            sides = {
                "one": partial(together, single, name, images),
                "two": partial(together, pair, name, images // 2),
            }
            times = own_times(sides, repeats)
            about = f"{name}, {images} images in batches of {batch}: 1 process with 2 threads / 2 processes with 1"
            label = "processes" if name == "vit_tiny" else f"processes_{name}"
            ratios.append(ratio(label, about, times["one"], times["two"], images))
    return ratios
