"""What prediction costs beside the backbone, as classes and tasks grow.

That is retrieval, class scores and the making of a `Prediction`: everything between ready embeddings and what the
user gets. The backbone's part, one pass per image and one per candidate, does not grow with the classes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from statistics import median

import torch
from torch import Tensor

from protosteer.bench.prediction import best_batch, plain_passes
from protosteer.bench.subjects import class_record, pictures, vit_tiny
from protosteer.bench.timing import Ratio, Side, interleaved
from protosteer.method.inference import Index, Matches, Prediction, match
from protosteer.method.memory import Memory, TaskRecord
from protosteer.method.vit import ViT
from protosteer.settings import Settings

CLASSES = (100, 1_000, 10_000, 100_000)
JUDGED = 10_000  # the number of classes at which the target holds
CENTROIDS, DIM = 5, 192
MOST_TASKS = 1_000
MOST_IMAGES, MOST_SCORES = 128, 6_400_000  # images handled at once, and their scores over all classes
CURVE_REPEATS = 2  # for points that only make up the curve
POOL = 997  # classes that differ; more of them are copies, so that memory holds 10^5 classes
TARGET = 0.95


@dataclass(frozen=True)
class Point:
    """Seconds per image at one number of classes, of each repeat."""

    classes: int
    tasks: int
    passes: float  # of the backbone, per image
    backbone: list[float]
    overhead: list[float]
    index: float  # seconds to make the index of the memory, not per image

    @property
    def share(self) -> float:
        """Overhead in percent of the backbone's time."""
        return 100 * median(self.overhead) / median(self.backbone)

    def __str__(self) -> str:
        cost = f"{1000 * median(self.overhead):.2f} ms an image, {self.share:.1f} %"
        return f"{self.classes:,} classes, {self.tasks:,} tasks: {cost}; index made in {self.index:.2f} s"


def run(repeats: int) -> list[Ratio]:
    points = curve(repeats)
    judged = next(point for point in points if point.classes == JUDGED)
    total = list(map(add, judged.backbone, judged.overhead))
    about = f"ViT-Ti/16: backbone's share of predict at {judged.classes:,} classes, {judged.tasks:,} tasks"
    backbone = (
        f"beside {1000 * median(judged.backbone):.0f} ms of {judged.passes:.1f} backbone passes an image:"
    )
    notes = [backbone, *map(str, points)]
    return [Ratio.of("many_classes", about, judged.backbone, total, TARGET, notes)]


def curve(repeats: int, classes: Sequence[int] = CLASSES) -> list[Point]:
    """The cost at each number of classes, in tasks of ten classes until there are `MOST_TASKS`."""
    backbone = vit_tiny()
    ready = backbone.preprocessing(pictures(backbone, 16))
    batch = best_batch(backbone.vit, ready, (8, 16))

    def at(number: int) -> Point:
        times = repeats if number == JUDGED else min(repeats, CURVE_REPEATS)
        return point(backbone.vit, ready, batch, number, min(number // 10, MOST_TASKS), times)

    return list(map(at, classes))


def point(vit: ViT, ready: Tensor, batch: int, classes: int, tasks: int, repeats: int) -> Point:
    memory = random_memory(classes, tasks)
    began = time.perf_counter()
    index = Index.build(memory)
    making = time.perf_counter() - began
    images = max(1, min(MOST_IMAGES, MOST_SCORES // classes))
    embeddings = torch.randn(images, DIM, generator=torch.Generator().manual_seed(1))
    sides: dict[str, Side] = {
        "backbone": partial(plain_passes, vit, ready, len(ready), batch),
        "overhead": partial(overhead, index, embeddings),
    }
    times = interleaved(sides, repeats)
    passes = overhead(index, embeddings).forward_passes / images
    backbone = [seconds * passes / len(ready) for seconds in times["backbone"]]
    rest = [seconds / images for seconds in times["overhead"]]
    return Point(classes, tasks, passes, backbone, rest, making)


def overhead(index: Index, embeddings: Tensor) -> Matches:
    """All that `Learner.predict` does with images whose embeddings are ready, under any prompt."""
    defaults = Settings()
    matches = match(index, lambda rows, _: embeddings[rows], len(embeddings), defaults.neighbours)
    joined = Matches.join([matches])
    Prediction.build(index, joined, defaults.temperature)
    return joined


def random_memory(classes: int, tasks: int) -> Memory:
    """Random centroids of DeiT-Tiny's dimension; the classes are dealt out to the tasks."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(POOL, CENTROIDS, DIM, generator=generator) for _ in range(2))
    pool = [class_record("", keys[k], values[k]) for k in range(POOL)]
    prompt = torch.zeros(1, 1, DIM)
    return Memory(
        TaskRecord(
            f"task-{t}",
            tuple(replace(pool[k % POOL], name=f"class-{k}") for k in range(t, classes, tasks)),
            prompt,
        )
        for t in range(tasks)
    )
