"""The class-incremental protocol: learn a task, test on every task so far against all classes so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from protosteer.evaluation import metrics
from protosteer.evaluation.cache import EmbeddingCache
from protosteer.evaluation.diagnosis import Diagnosis, diagnose
from protosteer.inference import Index, Matches, match
from protosteer.learner import Learner, Stage
from protosteer.memory import Memory
from protosteer.streams.base import Stream


@dataclass
class Run:
    """The outcome of one stream. Row i of `matrix` was measured when task i had just been learned."""

    matrix: list[list[float]] = field(default_factory=list)
    prompts_per_image: list[float] = field(default_factory=list)  # after each task
    retrieval: list[float] = field(default_factory=list)  # percent whose true task was retrieved
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    forward_passes: int = 0
    naive_forward_passes: int = 0
    bytes_per_task: float = 0.0
    bytes_per_class: float = 0.0
    trained_parameters: int = 0
    diagnosis: Diagnosis | None = None

    def figures(self) -> dict[str, float]:
        """The run's figures under the names that every command uses."""
        return {
            **metrics.summary(self.matrix),
            "prompts_per_image": self.prompts_per_image[-1],
            "retrieval_accuracy": self.retrieval[-1],
            "bytes_per_task": self.bytes_per_task,
            "bytes_per_class": self.bytes_per_class,
            "train_seconds": self.train_seconds,
            "eval_seconds": self.eval_seconds,
            "forward_passes": self.forward_passes,
            "naive_forward_passes": self.naive_forward_passes,
            "trained_parameters": self.trained_parameters,
        }


def run_stream(
    learner: Learner,
    stream: Stream,
    on_stage: Callable[[Stage], None] | None = None,
    on_task: Callable[[int, Run], None] | None = None,
) -> Run:
    """Learn the stream's tasks in order and evaluate after each."""
    run = Run()
    batch = learner.settings.embed_batch_size
    caches = [EmbeddingCache(learner.backbone, task.test, batch) for task in stream]
    for i, task in enumerate(stream):
        began = time.perf_counter()
        learner.learn((task.train, task.train_labels), name=task.name, on_stage=on_stage)
        learned = time.perf_counter()
        _evaluate(learner, stream, caches[: i + 1], run)
        run.train_seconds += learned - began
        run.eval_seconds += time.perf_counter() - learned
        run.forward_passes = sum(cache.forward_passes for cache in caches)
        _count(learner.memory, run)
        if on_task:
            on_task(i, run)
    run.diagnosis = diagnose(learner, stream, caches)
    return run


def _evaluate(learner: Learner, stream: Stream, caches: list[EmbeddingCache], run: Run) -> None:
    """One row of the matrix, with what is known now and nothing else."""
    index = Index.build(learner.memory)
    row: list[float] = []
    prompts: list[Tensor] = []
    retrieved: list[Tensor] = []
    for j, cache in enumerate(caches):
        matches = match_cached(learner, index, cache)
        row.append(accuracy(index, matches, stream[j].test_labels))
        prompts.append((matches.candidates & index.prompted).sum(dim=1))
        retrieved.append(matches.candidates[:, j])
        run.naive_forward_passes += matches.forward_passes
    run.matrix.append(row)
    run.prompts_per_image.append(float(torch.cat(prompts).float().mean()))
    run.retrieval.append(100.0 * float(torch.cat(retrieved).float().mean()))


def match_cached(learner: Learner, index: Index, cache: EmbeddingCache) -> Matches:
    return match(index, cache.embedder(learner.memory), len(cache.images), learner.settings.neighbours)


def accuracy(index: Index, matches: Matches, labels: list[str]) -> float:
    """Percent of images whose best class is their own."""
    number = {name: i for i, name in enumerate(index.classes)}
    truth = torch.tensor([number[label] for label in labels])
    return 100.0 * float((matches.scores.argmax(dim=1) == truth).float().mean())


def _count(memory: Memory, run: Run) -> None:
    total = sum(task.bytes for task in memory.tasks)
    run.bytes_per_task = total / len(memory)
    run.bytes_per_class = total / len(memory.classes)
    about: list[dict[str, Any]] = [task.about for task in memory.tasks]
    run.trained_parameters = sum(int(a.get("trained_parameters", 0)) for a in about)
