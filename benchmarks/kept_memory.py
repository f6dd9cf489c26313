"""glibc told to keep freed memory: prediction and training steps of a ViT-Ti/16, against its defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks.tools import NotHere, normalised, prompts, ratio, step
from benchmarks.workers import Job, Worker, own_times, together
from protosteer.allocator import keep_freed_memory
from protosteer.bench.subjects import memory_of, pictures, vit_tiny
from protosteer.bench.timing import Ratio
from protosteer.learner import Learner

IMAGES, BATCH = 64, 16


def prediction(kept: bool) -> Job:
    """A job for a worker."""
    if kept:
        keep_freed_memory()
    backbone = vit_tiny()
    learner = Learner(backbone)
    learner.memory = memory_of(backbone, tasks=10, classes_per_task=10, centroids=5)
    return partial(learner.predict, pictures(backbone, IMAGES))


def training(kept: bool) -> Job:
    if kept:
        keep_freed_memory()
    backbone = vit_tiny()
    images, prompt = normalised(backbone, BATCH), prompts(backbone.vit, 1)[0].requires_grad_()
    return lambda: step(backbone.vit, images, prompt)


def run(repeats: int) -> list[Ratio]:
    if not sys.platform.startswith("linux"):
        raise NotHere("only glibc can be told to keep memory")
    return [
        _compared("kept_memory_prediction", f"predict of {IMAGES} images", prediction, IMAGES, repeats),
        _compared("kept_memory_training", f"training step of {BATCH} images", training, BATCH, repeats),
    ]


def _compared(name: str, what: str, make: Callable[[bool], Job], images: int, repeats: int) -> Ratio:
    with ExitStack() as stack:
        workers = {kept: stack.enter_context(Worker(make, kept)) for kept in (False, True)}
        sides = {str(kept): partial(together, [worker]) for kept, worker in workers.items()}
        times = own_times(sides, repeats)
    about = f"ViT-Ti, {what}: glibc's defaults / freed memory kept"
    return ratio(name, about, times["False"], times["True"], images)
