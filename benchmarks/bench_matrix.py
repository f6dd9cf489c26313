"""Measure the accuracy matrix of a benchmark: our protocol, which caches embeddings, against one without a cache.

    python benchmarks/bench_matrix.py

The naive protocol predicts all test images of all tasks so far after every task by `Learner.predict`. Both use the same
records, so nothing is trained here.
"""

from __future__ import annotations

from dataclasses import replace
from operator import eq

from measure_script import measure_script
from protosteer.backbones import Backbone
from protosteer.bench.harness import Ratio, interleaved, memory_of, pictures, vit_tiny
from protosteer.data.images import ArrayImages
from protosteer.evaluation.protocol import Run, run_stream
from protosteer.learner import Learner
from protosteer.methods.base import TrainingTask
from protosteer.methods.cpp import CPP
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.settings import Settings
from protosteer.streams.base import Stream, Task

TASKS, CLASSES = 10, 10
IMAGES = 4  # test images per task
TARGET = 3.0


class RecordedCPP(CPP):
    """CPP whose task records are given: learning a task adds its record."""

    def __init__(self, backbone: Backbone, memory: Memory):
        super().__init__(backbone, Settings.preset("paper"))
        self.records = {record.name: record for record in memory.tasks}

    def learn(self, task: TrainingTask) -> None:
        self.learner.memory.add(self.records[task.name])


def run(repeats: int) -> list[Ratio]:
    backbone = vit_tiny()
    case = backbone, *subjects(backbone, TASKS, CLASSES, IMAGES)
    times = interleaved({"naive": lambda: naive_matrix(*case), "ours": lambda: our_run(*case)}, repeats)
    about = f"{backbone.name}: accuracy matrix of {TASKS} tasks, against predicting all again after each"
    passes = "forward passes: {forward_passes:,}, naive {naive_forward_passes:,}"
    notes = [passes.format(**our_run(*case).figures())]
    return [Ratio("matrix", about, times["naive"], times["ours"], TARGET, notes)]


def our_run(backbone: Backbone, memory: Memory, stream: Stream) -> Run:
    return run_stream(RecordedCPP(backbone, memory), stream, diagnosed=False)  # the matrix needs no error analysis


def naive_matrix(backbone: Backbone, memory: Memory, stream: Stream) -> list[list[float]]:
    """Compute the percentage correct on each task so far, after each task."""
    learner = Learner(backbone, Settings.preset("paper"))
    matrix = []

    def accuracy(task: Task) -> float:
        labels = learner.predict(task.test).labels
        return 100.0 * sum(map(eq, labels, task.test_labels)) / len(labels)

    for i, record in enumerate(memory.tasks):
        learner.memory.add(record)
        matrix.append([accuracy(task) for task in stream[: i + 1]])
    return matrix


def subjects(backbone: Backbone, tasks: int, classes: int, images: int) -> tuple[Memory, Stream]:
    """Make random records with `images` test images each, which are among its keys, so that they mostly retrieve it."""
    memory, stream = Memory(), []
    for number, record in enumerate(memory_of(backbone, tasks, classes).tasks):
        test = ArrayImages(pictures(backbone, images, seed=number))
        head, *tail = record.classes
        memory.add(replace(record, classes=ClassTable.of([replace(head, keys=backbone.embed_set(test)), *tail])))
        labels = [record.class_names[i % classes] for i in range(images)]
        stream.append(Task(record.name, record.class_names, ArrayImages(test.array[:0]), [], test, labels))
    return memory, Stream("random", stream)


if __name__ == "__main__":
    measure_script(run)
