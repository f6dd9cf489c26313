"""The class-incremental protocol: learn a task, test on every task so far against all classes so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from protosteer.errors import RunError
from protosteer.evaluation import metrics
from protosteer.evaluation.cache import EmbeddingCache
from protosteer.evaluation.diagnosis import Diagnosis, diagnose
from protosteer.evaluation.runs import SeedFolder
from protosteer.methods.base import Method
from protosteer.running.progress import OnStage, Stage
from protosteer.streams.base import Stream


@dataclass(frozen=True)
class Row:
    """One moment of a run: everything measured when a task had just been learned."""

    accuracy: list[float]  # percent on each task so far
    prompts_per_image: float | None  # mean over all test images of this evaluation
    retrieval_accuracy: float | None  # percent of them whose true task was among the candidates
    train_seconds: float
    eval_seconds: float
    forward_passes: int
    naive_forward_passes: int
    bytes: int  # of the state
    trained_parameters: int  # since the run began


@dataclass
class Run:
    """The outcome of one stream. Row i was measured when task i had just been learned."""

    test_images: list[int]  # of each task
    classes: list[int]  # of each task
    rows: list[Row] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    diagnosis_passes: int = 0  # forward passes that the diagnosis needed beyond the matrix

    @property
    def matrix(self) -> list[list[float]]:
        return [row.accuracy for row in self.rows]

    def figures(self) -> dict[str, Any]:
        """The run's figures under the names that every command uses."""
        last, tasks = self.rows[-1], len(self.rows)
        return {
            **metrics.summary(self.matrix, self.test_images),
            "prompts_per_image": last.prompts_per_image,
            "overall_prompts_per_image": self._overall_prompts(),
            "retrieval_accuracy": last.retrieval_accuracy,
            "bytes_per_task": last.bytes / tasks,
            "bytes_per_class": last.bytes / sum(self.classes[:tasks]),
            "trained_parameters": last.trained_parameters,
            "train_seconds": sum(row.train_seconds for row in self.rows),
            "eval_seconds": sum(row.eval_seconds for row in self.rows),
            "forward_passes": sum(row.forward_passes for row in self.rows),
            "naive_forward_passes": sum(row.naive_forward_passes for row in self.rows),
            "diagnosis_forward_passes": self.diagnosis_passes,
        }

    def _overall_prompts(self) -> float | None:
        """Mean over all images of all evaluations."""
        seen = [sum(self.test_images[: i + 1]) for i in range(len(self.rows))]
        counts = [row.prompts_per_image for row in self.rows if row.prompts_per_image is not None]
        if len(counts) < len(seen):
            return None
        return sum(c * n for c, n in zip(counts, seen, strict=True)) / sum(seen)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            **self.figures(),
            "matrix": self.matrix,
            "after_each_task": [
                {
                    "accuracy_over_tasks": metrics.average_accuracy(self.matrix, i),
                    "accuracy_over_images": metrics.image_accuracy(self.matrix, i, self.test_images),
                    "forgetting": metrics.forgetting(self.matrix, i),
                    **{key: value for key, value in asdict(row).items() if key != "accuracy"},
                }
                for i, row in enumerate(self.rows)
            ],
            "diagnosis": {"mean": self.diagnosis.mean(), **asdict(self.diagnosis)}
            if self.diagnosis
            else None,
        }


def run_stream(
    method: Method,
    stream: Stream,
    on_stage: OnStage | None = None,
    on_task: Callable[[int, Run], None] | None = None,
    store: SeedFolder | None = None,
    diagnosed: bool = True,
) -> Run:
    """Learn the stream's tasks in order and evaluate after each; with a `store`, from where it was left."""
    caches = [EmbeddingCache(method, task.test) for task in stream]
    run = Run([len(task.test) for task in stream], [len(task.classes) for task in stream])
    if store:
        _restore(method, run, caches, store)
    for i in range(len(run.rows), len(stream)):
        seconds = _learn(method, stream, i, on_stage, store)
        run.rows.append(_evaluate(method, stream, caches[: i + 1], seconds, on_stage))
        if store:
            fresh = {f"{j}/{key}": t for j, cache in enumerate(caches) for key, t in cache.take_new().items()}
            store.save_embeddings(i, fresh)
            store.save_rows([asdict(row) for row in run.rows])
        if on_task:
            on_task(i, run)
    if diagnosed:
        before = sum(cache.forward_passes for cache in caches)
        tests = [(cache, task.test_labels) for cache, task in zip(caches, stream, strict=True)]
        run.diagnosis = diagnose(method, tests)
        run.diagnosis_passes = sum(cache.forward_passes for cache in caches) - before
    return run


def _restore(method: Method, run: Run, caches: list[EmbeddingCache], store: SeedFolder) -> None:
    run.rows = [Row(**row) for row in store.rows()]
    for saved in store.embeddings():
        for j, cache in enumerate(caches):
            cache.put({k.removeprefix(f"{j}/"): t for k, t in saved.items() if k.startswith(f"{j}/")})
    if run.rows:
        learned = store.learned(len(run.rows) - 1)
        if learned is None:
            raise RunError(
                f"the model after task {len(run.rows)} is missing, though it was tested; the folder was altered"
            )
        method.restore(learned[0])


def _learn(
    method: Method, stream: Stream, i: int, on_stage: OnStage | None, store: SeedFolder | None
) -> float:
    """Seconds that learning task i took, those of interrupted training included."""
    if store and (learned := store.learned(i)):  # killed while it was being evaluated
        method.restore(learned[0])
        return learned[1]
    bookmark = store.bookmark(i) if store else None
    earlier = bookmark.seconds_spent() if bookmark else 0.0
    began = time.perf_counter()
    method.learn(stream[i], on_stage, bookmark)
    seconds = earlier + time.perf_counter() - began
    if store:
        store.save_learned(i, method.state(), seconds)
    return seconds


def _evaluate(
    method: Method,
    stream: Stream,
    caches: list[EmbeddingCache],
    train_seconds: float,
    on_stage: OnStage | None,
) -> Row:
    """One row of the matrix, with what is known now and nothing else."""
    began = time.perf_counter()
    made, asked = (sum(getattr(c, name) for c in caches) for name in ("forward_passes", "asked"))
    number = {name: k for k, name in enumerate(method.classes)}
    accuracy: list[float] = []
    prompts: list[Tensor] = []
    retrieved: list[Tensor] = []
    for j, cache in enumerate(caches):
        answer = method.answer(cache)
        truth = torch.tensor([number[label] for label in stream[j].test_labels])
        accuracy.append(100.0 * int((answer.classes == truth).sum()) / len(truth))
        if answer.prompts is not None:
            prompts.append(answer.prompts)
        if answer.candidates is not None:
            retrieved.append(answer.candidates[:, j])
        if on_stage:
            on_stage(Stage(stream[len(caches) - 1].name, "testing", j + 1, len(caches)))
    return Row(
        accuracy=accuracy,
        prompts_per_image=_mean(prompts),
        retrieval_accuracy=None if not retrieved else 100.0 * (_mean(retrieved) or 0.0),
        train_seconds=train_seconds,
        eval_seconds=time.perf_counter() - began,
        forward_passes=sum(cache.forward_passes for cache in caches) - made,
        naive_forward_passes=sum(cache.asked for cache in caches) - asked,
        bytes=sum(method.bytes_per_task()),
        trained_parameters=method.trained_parameters(),
    )


def _mean(parts: list[Tensor]) -> float | None:
    """Exact: whole numbers summed, then one division."""
    if not parts:
        return None
    values = torch.cat(parts)
    return int(values.sum()) / len(values)
