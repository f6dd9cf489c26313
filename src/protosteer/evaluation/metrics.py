"""Figures of a run, from its accuracy matrix.

A[i][j] is the accuracy in percent on task j's test images after learning task i, against all classes seen
by then; row i has i + 1 entries.
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def average_accuracy(matrix: Matrix, i: int) -> float:
    """A_i: mean over the tasks learned so far, each counting the same."""
    return _mean(matrix[i])


def image_accuracy(matrix: Matrix, i: int, test_images: Sequence[int]) -> float:
    """Accuracy after task i as a mean over images, so that large tasks count more."""
    weights = test_images[: i + 1]
    return sum(a * n for a, n in zip(matrix[i], weights, strict=True)) / sum(weights)


def forgetting(matrix: Matrix, i: int) -> float:
    """F_i: mean over earlier tasks of the greatest loss since any earlier moment; not clipped at 0."""
    if i == 0:
        return 0.0
    return _mean([max(matrix[k][j] - matrix[i][j] for k in range(j, i)) for j in range(i)])


def summary(matrix: Matrix) -> dict[str, float]:
    """Last and average accuracy and forgetting, under the names used everywhere."""
    tasks = range(len(matrix))
    return {
        "last_accuracy": average_accuracy(matrix, tasks[-1]),
        "avg_accuracy": _mean([average_accuracy(matrix, i) for i in tasks]),
        "last_forgetting": forgetting(matrix, tasks[-1]),
        "avg_forgetting": _mean([forgetting(matrix, i) for i in tasks[1:]]) if len(tasks) > 1 else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
