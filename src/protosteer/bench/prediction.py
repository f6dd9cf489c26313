"""Prediction against the limit, and with late prompts.

The limit: as many plain forward passes as prediction makes, without prompts, on tensors that are ready, in
batches of the best size, by the same `vit.py`. No retrieval, no matching, no preprocessing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.precision import FP32
from protosteer.bench.harness import Ratio, by_layer, interleaved, learner_for, pictures, quarters, vit_tiny
from protosteer.paper.vit import ViT

IMAGES, NANO_IMAGES = 64, 1024
BATCHES = (8, 16, 32, 64)
TARGET = 0.95


def run(repeats: int) -> list[Ratio]:
    """Measure a ViT-Ti and `nano`."""
    tiny = measure("predict", vit_tiny(), IMAGES, repeats)
    return tiny + measure("predict_nano", Backbone.load("nano", precision=FP32), NANO_IMAGES, repeats)


def measure(
    name: str, backbone: Backbone, count: int, repeats: int, precision: str = FP32, target: float = TARGET
) -> list[Ratio]:
    """Measure prediction of `count` images in a precision, against plain passes in fp32; late prompts in fp32 alone."""
    pixels, computing = pictures(backbone, count), backbone.in_precision(precision)
    layers = quarters(backbone) if precision == FP32 else [1]
    ours = {k: partial(learner_for(computing, k).predict, pixels) for k in layers}
    passes = count + sum(len(tasks) for tasks in ours[1]().candidates)
    limit = partial(plain_passes, backbone.vit, best_batch(backbone), passes)
    about = f"{backbone.name}: predict in {precision}, {passes / count:.2f} passes an image, against plain ones in fp32"
    return by_layer(name, about, count, {0: limit, **ours}, target, repeats)


def plain_passes(vit: ViT, batch: Tensor, passes: int) -> None:
    """Send `passes` images through the ViT: the same preprocessed batch [B, 3, H, W], repeated."""
    with torch.inference_mode():
        for start in range(0, passes, len(batch)):
            vit(batch[: passes - start])


def best_batch(backbone: Backbone) -> Tensor:
    """Return preprocessed images [B, 3, H, W] with the B that makes plain passes fastest, by a short trial."""
    images = backbone.preprocessing(pictures(backbone, max(BATCHES)))
    sides = {size: partial(plain_passes, backbone.vit, images[:size], len(images)) for size in BATCHES}
    times = interleaved(sides, 2)
    return images[: min(times, key=lambda size: min(times[size]))]
