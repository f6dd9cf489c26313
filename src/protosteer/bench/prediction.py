"""Prediction against the limit, and with late prompts.

The limit: as many plain forward passes as prediction makes, without prompts, on tensors that are ready, in
batches of the best size, by the same `vit.py`. No retrieval, no matching, no preprocessing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.bench.subjects import LATE, LATE_NANO, memory_of, pictures, vit_tiny
from protosteer.bench.timing import Ratio, interleaved
from protosteer.learner import Learner
from protosteer.method.vit import ViT

TASKS, CLASSES, CENTROIDS = 10, 10, 5
IMAGES, NANO_IMAGES = 64, 1024
FEW_IMAGES, FEW_NANO_IMAGES = 16, 256  # where many ways are compared, each of them linear in the images
BATCHES = (8, 16, 32, 64)
LIMIT_TARGET, TARGET = 0.95, 1.0


def run(repeats: int) -> list[Ratio]:
    tiny, nano = vit_tiny(), Backbone.load("nano")
    return [
        against_limit("predict", tiny, IMAGES, repeats),
        against_limit("predict_nano", nano, NANO_IMAGES, repeats),
        *late_prompts(tiny, FEW_IMAGES, repeats, LATE),
        *late_prompts(nano, FEW_NANO_IMAGES, repeats, LATE_NANO, "nano_"),
    ]


def learner_for(backbone: Backbone, prompt_from_layer: int = 1) -> Learner:
    """A learner of ten tasks of ten classes; all such learners retrieve the same candidates."""
    learner = Learner(backbone)
    learner.memory = memory_of(backbone, TASKS, CLASSES, CENTROIDS, prompt_from_layer)
    return learner


def against_limit(name: str, backbone: Backbone, count: int, repeats: int) -> Ratio:
    learner, pixels = learner_for(backbone), pictures(backbone, count)
    passes = count + sum(len(tasks) for tasks in learner.predict(pixels).candidates)
    ready = backbone.preprocessing(pixels)
    limit = partial(plain_passes, backbone.vit, ready, passes, best_batch(backbone.vit, ready))
    times = interleaved({"limit": limit, "ours": lambda: learner.predict(pixels)}, repeats)
    about = f"{backbone.name}: predict, against as many plain forward passes"
    notes = [f"{count / median(times['ours']):.1f} images a second, {passes / count:.2f} passes each"]
    return Ratio.of(name, about, times["limit"], times["ours"], LIMIT_TARGET, notes)


def plain_passes(vit: ViT, ready: Tensor, passes: int, batch: int) -> None:
    """Embeds the ready images [N, 3, H, W] again and again, until `passes` have been embedded."""
    rounds, rest = divmod(passes, len(ready))
    with torch.inference_mode():
        for images in [ready] * rounds + [ready[:rest]] * (rest > 0):
            for some in images.split(batch):
                vit(some)


def best_batch(vit: ViT, ready: Tensor, sizes: Sequence[int] = BATCHES) -> int:
    """The size of batches at which plain passes are quickest, by a short trial."""
    some = ready[: max(sizes)]
    sides = {size: partial(plain_passes, vit, some, len(some), size) for size in sizes}
    times = interleaved(sides, 2, warm_up=False)
    return min(times, key=lambda size: min(times[size]))


def late_prompts(
    backbone: Backbone, count: int, repeats: int, late: Sequence[int], which: str = ""
) -> list[Ratio]:
    """Ours with prompts in all layers against prompts from layer k on."""
    pixels = pictures(backbone, count)
    sides = {k: partial(learner_for(backbone, k).predict, pixels) for k in (1, *late)}
    times = interleaved(sides, repeats)
    ratios = []
    for k in late:
        rates = [count / median(times[one]) for one in (k, 1)]
        notes = ["{:.1f} images a second against {:.1f}".format(*rates)]
        about = f"{backbone.name}: predict with prompts from layer {k} on, against all layers"
        ratios.append(Ratio.of(f"late_predict_{which}k{k}", about, times[1], times[k], TARGET, notes))
    return ratios
