"""Blurry task boundaries: some training images of a class arrive in other tasks.

The setting is Si-Blurry of Moon et al., Online class incremental learning on stochastic blurry task boundary via mask
and visual prompt tuning (ICCV 2023). It has two shares: N of the classes are disjoint, and of each other class a
share M of the images arrives in other tasks. Here M is `blurry` and N is `disjoint`; the paper uses M = 0.1 and
N = 0.5 with 5 tasks.

- The other options assign every class to one task.
- round(N * classes) classes, drawn by the seed, are disjoint: all their images stay in their task.
- Of every other class, round(M * images) training images, but never all, are drawn by the seed. Each goes to one of
  the other tasks with equal probability. So the number of images that a task receives is random.

Differences from the paper: it also draws how many classes a task has (here, use a task file) and how many images a
task gives away. There, an image that was drawn may return to its own task, so fewer than M leave.

The draw of a class depends on the seed, its number in the dataset, and its numbers of images and tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protosteer.errors import DataError

Rows = list[np.ndarray]  # by class number, each in file order


def distribute(rows: Rows, groups: Sequence[Sequence[int]], blurry: float, disjoint: float, seed: int) -> list[Rows]:
    """Assign the training rows of every class to tasks.

    Args:
        rows: The rows of each class, by class number.
        groups: The numbers of each task's own classes.
        blurry: The share M of images that arrive in other tasks.
        disjoint: The share N of classes whose images all stay.
        seed: The seed of the draw.

    Returns:
        For each task, the rows of each class, by class number.

    Raises:
        DataError: There are fewer than two tasks to move images between (code "too-few-tasks").
    """
    if blurry and len(groups) < 2:
        raise DataError("blurry task boundaries need at least 2 tasks", code="too-few-tasks")
    class_numbers = sorted(k for group in groups for k in group)
    fixed_classes = set(_draw(seed, 0).permutation(class_numbers)[: round(disjoint * len(class_numbers))].tolist())
    by_task = [[class_rows[:0] for class_rows in rows] for _ in groups]
    for home, group in enumerate(groups):
        other_tasks = np.array([task for task in range(len(groups)) if task != home])
        for k in group:
            homes = np.full(len(rows[k]), home)
            if blurry and k not in fixed_classes:
                draw = _draw(seed, 1 + k)
                moves = draw.permutation(len(homes))[: min(round(blurry * len(homes)), len(homes) - 1)]
                homes[moves] = draw.choice(other_tasks, len(moves))
            for task in range(len(groups)):
                by_task[task][k] = rows[k][homes == task]
    return by_task


def _draw(seed: int, number: int) -> np.random.RandomState:
    return np.random.RandomState([seed, number])
