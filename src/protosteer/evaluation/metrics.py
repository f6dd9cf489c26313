"""Metrics of a run, from its accuracy matrix.

A[i][j] is the accuracy in percent on task j's test images after learning task i, among all classes learned by then. Row
i has i + 1 entries.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from protosteer.util.statistics import Bins

Matrix = Sequence[Sequence[float]]


def average_accuracy(matrix: Matrix, i: int) -> float:
    """Compute A_i: the mean over the tasks learned so far."""
    return _mean(matrix[i])


def image_accuracy(matrix: Matrix, i: int, test_images: Sequence[int]) -> float:
    """Compute the accuracy after task i as a mean over images, so large tasks count more."""
    weights = test_images[: i + 1]
    return sum(a * n for a, n in zip(matrix[i], weights, strict=True)) / sum(weights)


def anytime_accuracy(accuracies: Sequence[float], train_images: Sequence[int]) -> float:
    """Compute A_AUC of Koh et al. (ICLR 2022): the area under accuracy over training images.

    Each accuracy is over the classes learned by then; train_images are those of each task, all 0 if unknown.
    """
    weights = train_images if any(train_images) else [1] * len(train_images)
    return sum(a * n for a, n in zip(accuracies, weights, strict=True)) / sum(weights)


def forgetting(matrix: Matrix, i: int, least: float = -math.inf) -> float:
    """Compute F_i: the mean over tasks j < i of max over k in j..i-1 of A[k][j] - A[i][j], 0 for the first task.

    With `least` 0, the drop of each task is clipped at 0, as in the code of CPP's authors.
    """
    if i == 0:
        return 0.0
    return _mean([max(least, *(matrix[k][j] - matrix[i][j] for k in range(j, i))) for j in range(i)])


def backward_transfer(matrix: Matrix) -> float:
    """Compute BWT of Lopez-Paz and Ranzato (2017): the mean over tasks j < T of A[T][j] - A[j][j]; 0 of one task."""
    last = matrix[-1]
    return _mean([last[j] - matrix[j][j] for j in range(len(matrix) - 1)]) if len(matrix) > 1 else 0.0


def forward_transfer(next_accuracies: Sequence[float | None], classes: Sequence[int]) -> float | None:
    """Compute FWT of Lopez-Paz and Ranzato (2017): the mean over tasks j of A[j-1][j] - chance.

    In a class-incremental stream it is not defined, because no class of a task is known before the task.

    Args:
        next_accuracies: A[j-1][j], the accuracy on a task before it is learned, on images of classes known by then;
            None if there are none.
        classes: How many classes were known by then; chance is 100 / classes.

    Returns:
        The mean over all tasks that have an accuracy; None if none has.
    """
    gains = [a - 100.0 / known for a, known in zip(next_accuracies, classes, strict=True) if a is not None]
    return _mean(gains) if gains else None


def summary(matrix: Matrix, test_images: Sequence[int] | None = None) -> dict[str, float]:
    """Compute last and average accuracy, forgetting and backward transfer.

    The paper's metrics are means over tasks. `..._image_accuracy` are means over images, which differ if tasks have
    unequal numbers of test images.

    Args:
        matrix: The accuracy matrix.
        test_images: The number of test images of each task; None: no means over images.

    Returns:
        The metrics by name.
    """
    tasks = range(len(matrix))
    figures = {
        "last_accuracy": average_accuracy(matrix, tasks[-1]),
        "avg_accuracy": _mean([average_accuracy(matrix, i) for i in tasks]),
        "last_forgetting": forgetting(matrix, tasks[-1]),
        "avg_forgetting": _mean([forgetting(matrix, i) for i in tasks[1:]]) if len(tasks) > 1 else 0.0,
        "clipped_forgetting": forgetting(matrix, tasks[-1], 0.0),
        "backward_transfer": backward_transfer(matrix),
    }
    if test_images is not None:
        over_images = [image_accuracy(matrix, i, test_images) for i in tasks]
        figures |= {"last_image_accuracy": over_images[-1], "avg_image_accuracy": _mean(over_images)}
    return figures


def pooled(parts: Sequence[Bins]) -> list[dict[str, Any]]:
    """Pool the bins of several seeds."""
    return [_pool(column) for column in zip(*parts, strict=True)]


def _pool(same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    filled = [b for b in same if b["images"]]
    images = sum(b["images"] for b in filled)
    means = {n: sum(b[n] * b["images"] for b in filled) / images if images else None for n in _MEANS}
    return {"images": images, **means}


_MEANS = ("confidence", "accuracy")


def over_seeds(seeds: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Compute mean and sample standard deviation of every metric that all seeds have; 0 for one seed."""
    names = [name for name, value in seeds[0].items() if _is_figure(value) and name != "seed"]
    columns: dict[str, list[Any]] = {name: [seed.get(name) for seed in seeds] for name in names}
    whole = {name: [float(v) for v in values] for name, values in columns.items() if all(map(_is_figure, values))}
    mean = {name: statistics.fmean(values) for name, values in whole.items()}
    std = {name: statistics.stdev(values) if len(values) > 1 else 0.0 for name, values in whole.items()}
    return mean, std


def _is_figure(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
