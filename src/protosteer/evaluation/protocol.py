"""The class-incremental protocol: learn a task, then test on every task so far among all classes so far.

With blurry task boundaries, classes of later tasks may have training images already. They are among the classes to
predict, and their test images are tested, but they have no entry in the matrix, which has a column per learned task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from protosteer.evaluation import metrics
from protosteer.evaluation.embedding_cache import CacheRows, EmbeddingCache
from protosteer.evaluation.predictions import Predictions, PredictionsBuilder
from protosteer.evaluation.seed_folder import SeedFolder, reading
from protosteer.methods.base import Images, Method
from protosteer.runtime.progress import OnStage, Progress, Stage
from protosteer.streams.base import Stream, training_view
from protosteer.util import statistics


@dataclass
class Run:
    """The results of one stream.

    Attributes:
        test_images: The number of test images of each task.
        classes: The number of classes that each task introduced.
        train_images: The number of training images of each task.
        rows: What was measured after each task; see `_evaluate`.
        diagnosis: The error analysis after the last task.
        diagnosis_passes: Forward passes that the error analysis needed beyond the matrix.
        visiting_images: Training images in another task than that of their class.
        predictions: The predictions after the last task so far.
    """

    test_images: list[int]
    classes: list[int]
    train_images: list[int]
    rows: list[dict[str, Any]] = field(default_factory=list)
    diagnosis: dict[str, Any] | None = None
    diagnosis_passes: int = 0
    visiting_images: int = 0
    predictions: Predictions | None = None

    @property
    def matrix(self) -> list[list[float]]:
        """The accuracy matrix; see `metrics.py`."""
        return [row["accuracy"] for row in self.rows]

    def figures(self) -> dict[str, Any]:
        """Return the metrics by the names that every command uses."""
        last, tasks = self.rows[-1], len(self.rows)
        return {
            **metrics.summary(self.matrix, self.test_images),
            "anytime_accuracy": metrics.anytime_accuracy(self._accuracy_so_far(), self.train_images[:tasks]),
            "task_incremental_accuracy": _average(last.get("given_task_accuracy")),
            "forward_transfer": self._forward_transfer(),
            **self._blurred(),
            "passes_per_image": last.get("passes_per_image"),
            "overall_passes_per_image": self._overall("passes_per_image"),
            "prompts_per_image": last["prompts_per_image"],
            "overall_prompts_per_image": self._overall("prompts_per_image"),
            "calibration_error": last.get("calibration_error"),
            "retrieval_accuracy": last["retrieval_accuracy"],
            "bytes_per_task": last["bytes"] / tasks,
            "bytes_per_class": last["bytes"] / sum(self.classes[:tasks]),
            **last.get("paper_bytes", {}),
            "trained_parameters": last["trained_parameters"],
            "train_seconds": self._sum("train_seconds"),
            "eval_seconds": self._sum("eval_seconds"),
            "forward_passes": self._sum("forward_passes"),
            "naive_forward_passes": self._sum("naive_forward_passes"),
            "diagnosis_forward_passes": self.diagnosis_passes,
        }

    def _accuracy_so_far(self) -> list[float]:
        """Return the accuracy after each task, on all test images of the classes learned by then."""
        over_images = (metrics.image_accuracy(self.matrix, i, self.test_images) for i in range(len(self.rows)))
        return [row.get("seen_accuracy", a) for row, a in zip(self.rows, over_images, strict=True)]

    def _forward_transfer(self) -> float | None:
        before = [row.get("next_accuracy") for row in self.rows]
        return metrics.forward_transfer(before, [row.get("known_classes", 1) for row in self.rows])

    def _blurred(self) -> dict[str, float]:
        """Return the percentage of training images in another task than their class's; nothing if 0."""
        share = 100.0 * self.visiting_images / max(1, sum(self.train_images))
        return {"blurred_images": share} if share else {}

    def _sum(self, name: str) -> Any:
        return sum(row[name] for row in self.rows)

    def _overall(self, name: str) -> float | None:
        """Average over all images of all evaluations; None if one of them, of an older version, lacks it."""
        images = [row.get("seen_images", sum(self.test_images[: i + 1])) for i, row in enumerate(self.rows)]
        counts: list[Any] = [row.get(name) for row in self.rows]
        if None in counts:
            return None
        return sum(c * n for c, n in zip(counts, images, strict=True)) / sum(images)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            **self.figures(),
            "matrix": self.matrix,
            "after_each_task": [
                {
                    "accuracy_over_tasks": metrics.average_accuracy(self.matrix, i),
                    "accuracy_over_images": metrics.image_accuracy(self.matrix, i, self.test_images),
                    "forgetting": metrics.forgetting(self.matrix, i),
                    **{key: value for key, value in row.items() if key not in ("accuracy", "reliability")},
                }
                for i, row in enumerate(self.rows)
            ],
            "reliability": self.rows[-1].get("reliability"),
            "diagnosis": self.diagnosis,
        }


def run_stream(
    method: Method,
    stream: Stream,
    on_stage: OnStage | None = None,
    on_task: Callable[[int, Run], None] | None = None,
    store: SeedFolder | None = None,
    diagnosed: bool = True,
) -> Run:
    """Learn the stream's tasks in order and evaluate after each.

    Args:
        method: The method, which has learned nothing.
        stream: The tasks.
        on_stage: Called with progress.
        on_task: Called after each task with its number and the run so far.
        store: Where the run is saved and resumed from; None: nowhere.
        diagnosed: Whether to analyse errors at the end.

    Returns:
        The results.
    """
    if stream.repeats_classes:
        method.require_repeated_classes()
    caches = [EmbeddingCache(method, task.test) for task in stream]
    run = Run(
        [len(task.test) for task in stream],
        [len(set(task.classes).difference(*(other.classes for other in stream[:i]))) for i, task in enumerate(stream)],
        [len(task.train) for task in stream],
        visiting_images=sum(sum(task.visitors.values()) for task in stream),
    )
    if store:
        _restore(method, run, stream, caches, store)
    for i in range(len(run.rows), len(stream)):
        training = _learn(method, stream, i, on_stage, store)
        row, run.predictions = _evaluate(method, stream, i, caches, on_stage)
        run.rows.append({**row, **training})
        if store:
            store.save_predictions(i, run.predictions)
            new = {f"{j}/{key}": t for j, cache in enumerate(caches) for key, t in cache.take_new().items()}
            store.save_embeddings(i, new)
            store.save_rows(run.rows)
        if on_task:
            on_task(i, run)
    if diagnosed:
        before = sum(cache.forward_passes for cache in caches)
        run.diagnosis = _diagnose(method, stream, caches)
        run.diagnosis_passes = sum(cache.forward_passes for cache in caches) - before
    return run


def _restore(method: Method, run: Run, stream: Stream, caches: list[EmbeddingCache], store: SeedFolder) -> None:
    run.rows = store.rows()
    with reading(store.unfinished):
        if len(run.rows) > len(stream):
            raise ValueError(f"{len(run.rows)} rows for {len(stream)} tasks")
        for saved in store.embeddings():
            for j, cache in enumerate(caches):
                cache.put({k.removeprefix(f"{j}/"): t for k, t in saved.items() if k.startswith(f"{j}/")})
    last = len(run.rows) - 1
    if run.rows and (learned := store.learned(last)):
        _restore_state(method, learned[0], stream, last, store)
        run.predictions = store.predictions(last)


def _restore_state(method: Method, state: bytes, stream: Stream, i: int, store: SeedFolder) -> None:
    """Restore what was learned up to task i; its classes must be those of the stream."""
    method.restore(state)
    with reading(store.path):
        classes, known = method.classes, {*stream.classes_until(i)}
        if len({*classes}) < len(classes) or not known <= {*classes} <= {*stream.classes}:
            raise ValueError("the saved state has other classes")


class LossHistory:
    """Records the mean loss of every epoch of a task's trainings, and passes progress on."""

    def __init__(self, on_stage: OnStage | None):
        self.on_stage = on_stage
        self.trainings: list[Progress] = []  # the last progress of each

    def __call__(self, stage: Stage) -> None:
        """Record a step; a training begins when the one before has made all its steps."""
        if stage.training:
            unfinished = self.trainings and self.trainings[-1].step < self.trainings[-1].steps
            self.trainings[len(self.trainings) - bool(unfinished) :] = [stage.training]
        if self.on_stage:
            self.on_stage(stage)


def _learn(
    method: Method, stream: Stream, i: int, on_stage: OnStage | None, store: SeedFolder | None
) -> dict[str, Any]:
    """Learn task i; returns its seconds, including those of interrupted training, and the losses of its epochs."""
    if store and (learned := store.learned(i)):  # the process was killed during evaluation
        _restore_state(method, learned[0], stream, i, store)
        return learned[1]
    checkpoint = store.checkpoint(i) if store else None
    earlier = checkpoint.seconds_spent() if checkpoint else 0.0
    began, history = time.perf_counter(), LossHistory(on_stage)
    with training_view(stream[i], history, checkpoint) as task:
        method.learn(task)
    training = {
        "train_seconds": earlier + time.perf_counter() - began,
        "losses": [list(progress.losses) for progress in history.trainings],
    }
    if store:
        store.save_learned(i, method.state(), training)
    return training


def _evaluate(
    method: Method, stream: Stream, i: int, caches: list[EmbeddingCache], on_stage: OnStage | None
) -> tuple[dict[str, Any], Predictions]:
    """Measure one row of the matrix, after task i."""
    began = time.perf_counter()
    passes, requests = (sum(getattr(c, name) for c in caches) for name in ("forward_passes", "requests"))
    builder = PredictionsBuilder(stream.classes, method.classes)
    right, prompts, retrieved, confidence = [], [], [], []
    tests, brought = _tests(stream, i, caches), [set(task.learned) for task in stream[: i + 1]]
    for done, (j, labels, images) in enumerate(tests, 1):
        answer = method.answer(images)
        builder.add(j, stream[j].classes, labels, answer)
        if stream.domains and j > i:  # measures forward transfer only
            continue
        right.append(answer.classes == torch.tensor([builder.number[label] for label in labels]))
        prompts.append(answer.prompts)
        if answer.candidates is not None:
            owners = [t == j for t in range(i + 1)]  # of an image in a domain: its own
            owning = torch.tensor(
                [owners if stream.domains else [label in classes for classes in brought] for label in labels]
            )
            retrieved.append((answer.candidates & owning).any(dim=1))
        confidence.append(answer.confidence)
        if on_stage:
            on_stage(Stage(stream[i].name, "testing", done, len(tests)))
    prompts_per_image = _mean(prompts)
    sure = [part for part in confidence if part is not None]
    bins = statistics.reliability(torch.cat(sure), torch.cat(right)) if sure else None
    seen = {"seen_accuracy": _mean(right, of=100.0), "seen_images": sum(map(len, right))}
    predictions = builder.build()
    row = {
        "accuracy": [100.0 * int(hits.sum()) / len(hits) for hits in right[: i + 1]],  # on each task so far
        "given_task_accuracy": _given_task(predictions, i),
        "next_accuracy": _average((100.0 * predictions.right[predictions.task == i + 1]).tolist()),
        "known_classes": len(method.classes),
        **(seen if stream.blurry else {}),  # on all images of the classes seen
        "passes_per_image": 1 + (prompts_per_image or 0),  # all passes, the plain one included
        "prompts_per_image": prompts_per_image,
        "calibration_error": statistics.calibration_error(bins) if bins else None,
        "reliability": bins,
        "retrieval_accuracy": _mean(retrieved, of=100.0),  # of images with a task of their class as candidate
        "eval_seconds": time.perf_counter() - began,
        "forward_passes": sum(cache.forward_passes for cache in caches) - passes,
        "naive_forward_passes": sum(cache.requests for cache in caches) - requests,
        "bytes": sum(method.bytes_per_task()),  # of the state
        "paper_bytes": method.paper_bytes(),  # as the method's paper counts
        "trained_parameters": method.trained_parameters(),  # since the run began
    }
    return row, predictions


def _diagnose(method: Method, stream: Stream, caches: list[EmbeddingCache]) -> dict[str, Any]:
    """Analyse the errors on the test images of every task learned; returns metrics per task, and their mean."""
    number = {name: k for k, name in enumerate(method.classes)}
    tasks = []
    for j, (task, images) in enumerate(zip(stream, caches, strict=True)):
        truth, own = (torch.tensor([number[name] for name in names]) for names in (task.test_labels, task.classes))
        tasks.append(method.diagnose(images, truth, j, own))
    named = [{"task": task.name, **figures} for task, figures in zip(stream, tasks, strict=True)]
    return {"mean": {name: sum(t[name] for t in tasks) / len(tasks) for name in tasks[0]}, "tasks": named}


def _given_task(predictions: Predictions, i: int) -> list[float] | None:
    """Compute the accuracy on each task up to i among that task's own classes; None without scores."""
    if predictions.given_task is None:
        return None
    right = predictions.given_task == predictions.actual
    own = [right[predictions.task == j] for j in range(i + 1)]
    return [100.0 * int(hits.sum()) / len(hits) for hits in own]


def _average(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _tests(stream: Stream, i: int, caches: list[EmbeddingCache]) -> list[tuple[int, list[str], Images]]:
    """Return task, labels and test images after task i: every task so far, then what is known of later tasks.

    With blurry task boundaries, these are the images of classes that came early. Of domains, only the next one counts.
    """
    tests: list[tuple[int, list[str], Images]] = [
        (j, task.test_labels, cache) for j, (task, cache) in enumerate(zip(stream[: i + 1], caches, strict=False))
    ]
    known = stream.classes_until(i)
    later = slice(i + 1, i + 2 if stream.domains else None)
    for j, (task, cache) in enumerate(zip(stream[later], caches[later], strict=True), i + 1):
        rows = [row for row, label in enumerate(task.test_labels) if label in known]
        if rows:
            tests.append((j, [task.test_labels[row] for row in rows], CacheRows(cache, torch.tensor(rows))))
    return tests


def _mean(parts: Sequence[Tensor | None], of: float = 1.0) -> float | None:
    """Average exactly: sum integers, then divide once; None if the method reports nothing."""
    known = [part for part in parts if part is not None]
    return of * (int(torch.cat(known).sum()) / sum(map(len, known))) if known else None
