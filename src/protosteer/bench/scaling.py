"""Measure the cost of prediction beside the backbone, as classes and tasks grow.

That is retrieval, class scores and the making of a `Prediction`: everything between embeddings and the
result. The backbone's part, one pass per image and one per candidate, does not grow with the classes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import add
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.bench.harness import Ratio, Side, interleaved, memory_of, vit_tiny
from protosteer.bench.prediction import best_batch, plain_passes
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.settings import Settings

CLASSES = (100, 1_000, 10_000, 100_000)
TARGET_CLASSES = 10_000  # the number of classes at which the target holds
MAX_TASKS = 1_000  # tasks have ten classes until there are so many
MAX_IMAGES, MAX_SCORES = 128, 6_400_000  # images handled at once, and their scores over all classes
TARGET = 0.95


def run(repeats: int) -> list[Ratio]:
    """Measure CPP inference and the default classifier."""
    backbone = vit_tiny()
    batch = best_batch(backbone)
    return [measure_rule(backbone, batch, rule, repeats) for rule in ("paper", "evidence")]


def measure_rule(backbone: Backbone, batch: Tensor, rule: str, repeats: int) -> Ratio:
    """Return the ratio at TARGET_CLASSES, with notes on all numbers of classes."""
    ratios = {classes: measure(backbone, batch, classes, rule, repeats) for classes in CLASSES}
    return replace(ratios[TARGET_CLASSES], notes=[note for ratio in ratios.values() for note in ratio.notes])


def measure(backbone: Backbone, batch: Tensor, classes: int, rule: str, repeats: int) -> Ratio:
    """Measure the backbone's share of a prediction's time."""
    tasks = min(classes // 10, MAX_TASKS)
    learner = Learner(backbone, Settings.preset("paper", rule=rule))
    learner.memory = memory_of(backbone, tasks, classes // tasks, evidence=rule == "evidence")
    began = perf_counter()
    _ = learner.reader
    opening = perf_counter() - began
    images = max(1, min(MAX_IMAGES, MAX_SCORES // classes))
    embeddings = torch.randn(images, backbone.dim, generator=torch.Generator().manual_seed(1))
    sides: dict[str, Side] = {
        "backbone": partial(plain_passes, backbone.vit, batch, len(batch)),
        "rest": partial(overhead, learner, embeddings),
    }
    times = interleaved(sides, repeats)
    passes = float(overhead(learner, embeddings).passes.double().mean())
    forward = [seconds * passes / len(batch) for seconds in times["backbone"]]
    image_times = [seconds / images for seconds in times["rest"]]
    about = f"{backbone.name}: backbone's share of predict at {classes:,} classes, rule: {rule}"
    note = (
        f"{classes:,} classes, {tasks:,} tasks: {1000 * median(image_times):.2f} ms an image beside "
        f"{1000 * median(forward):.0f} ms of {passes:.1f} backbone passes; {opening:.1f} s to open the model, or "
        "after any change to it"
    )
    name = "many_classes" if rule == "paper" else "many_classes_evidence"
    return Ratio(name, about, forward, list(map(add, forward, image_times)), TARGET, [note])


def overhead(learner: Learner, embeddings: Tensor) -> Prediction:
    """Do all that `Learner.predict` does after the backbone: embeddings [B, D] are the same under any prompt."""
    return learner.predict_embedded(lambda rows, _: embeddings[rows], len(embeddings))
