"""The full accuracy matrix of a stream: our protocol, which keeps embeddings, against one that starts afresh.

The naive protocol predicts all test images of all tasks so far after every task, coarse pass and candidates again,
by the same quick `Learner.predict`. Both judge the same records, so nothing is trained here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import eq

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.bench.subjects import memory_of, pictures, vit_tiny
from protosteer.bench.timing import Ratio, interleaved
from protosteer.data.images import ArrayImages
from protosteer.evaluation.protocol import Run, run_stream
from protosteer.learner import Learner
from protosteer.method.memory import Memory, TaskRecord
from protosteer.methods.base import Lesson
from protosteer.methods.cpp import CPP
from protosteer.running.progress import OnStage
from protosteer.running.resume import Bookmark
from protosteer.settings import Settings
from protosteer.streams.base import Stream, Task

TASKS, CLASSES, CENTROIDS = 10, 10, 5
IMAGES = 4  # test images per task
MOST_REPEATS = 3
TARGET = 3.0


class Known(CPP):
    """CPP that has a task's record before it meets the task: learning is taking it over."""

    def __init__(self, backbone: Backbone, memory: Memory):
        super().__init__(backbone, Settings())
        self.records = {record.name: record for record in memory.tasks}

    def learn(self, task: Lesson, on_stage: OnStage | None = None, bookmark: Bookmark | None = None) -> None:
        self.learner.memory.add(self.records[task.name])


def run(repeats: int) -> list[Ratio]:
    backbone = vit_tiny()
    memory, stream = subjects(backbone, TASKS, CLASSES, IMAGES)
    return [measure(backbone, memory, stream, min(repeats, MOST_REPEATS))]


def measure(backbone: Backbone, memory: Memory, stream: Stream, repeats: int) -> Ratio:
    figures = our_run(backbone, memory, stream).figures()  # warms up too
    times = interleaved(
        {
            "naive": partial(naive_matrix, backbone, memory, stream),
            "ours": partial(our_run, backbone, memory, stream),
        },
        repeats,
        warm_up=False,
    )
    about = (
        f"{backbone.name}: accuracy matrix of {len(stream)} tasks, against predicting all again after each"
    )
    notes = ["forward passes: {forward_passes:,}, naive {naive_forward_passes:,}".format(**figures)]
    return Ratio.of("matrix", about, times["naive"], times["ours"], TARGET, notes)


def our_run(backbone: Backbone, memory: Memory, stream: Stream) -> Run:
    return run_stream(Known(backbone, memory), stream, diagnosed=False)  # it is more than the matrix


def naive_matrix(backbone: Backbone, memory: Memory, stream: Stream) -> list[list[float]]:
    """Percent right on each task so far, after each task."""
    learner = Learner(backbone)
    matrix = []

    def accuracy(task: Task) -> float:
        labels = learner.predict(task.test).labels
        return 100.0 * sum(map(eq, labels, task.test_labels)) / len(labels)

    for i, record in enumerate(memory.tasks):
        learner.memory.add(record)
        matrix.append([accuracy(task) for task in stream[: i + 1]])
    return matrix


def subjects(backbone: Backbone, tasks: int, classes: int, images: int) -> tuple[Memory, Stream]:
    """Random records, and so many test images for each, labelled as their own task alone would label them."""
    memory, stream = Memory(), []
    for number, record in enumerate(memory_of(backbone, tasks, classes, CENTROIDS).tasks):
        test = ArrayImages(pictures(backbone, images, seed=number))
        memory.add(retrieved_by(record, backbone.embed_set(test)))
        alone = Learner(backbone)
        alone.memory.add(record)
        labels = alone.predict(test).labels
        stream.append(Task(record.name, record.class_names, ArrayImages(test.array[:0]), [], test, labels))
    return memory, Stream("random", stream)


def retrieved_by(record: TaskRecord, queries: Tensor) -> TaskRecord:
    """The record with queries [n, D] for its first keys: a task's own images mostly retrieve it."""
    keys = torch.cat([queries] + [part.keys for part in record.classes])
    sizes = [len(part.keys) for part in record.classes]
    shifted = zip(record.classes, keys[: sum(sizes)].split(sizes), strict=True)
    return replace(record, classes=tuple(replace(part, keys=own) for part, own in shifted))
