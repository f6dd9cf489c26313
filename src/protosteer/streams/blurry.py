"""Blurry task boundaries: some images of a class arrive in other tasks than its own.

The setting is that of Moon et al., Online class incremental learning on stochastic blurry task boundary via mask
and visual prompt tuning (ICCV 2023), called Si-Blurry, with its two shares: N of the classes are disjoint, and of
the others a share M of the images comes in other tasks. Here M is `blurry` and N is `disjoint`; the paper has
M = 0.1 and N = 0.5 in 5 tasks.

- Every class has a task of its own, by the options that share out classes.
- round(N * classes) of the classes, drawn by the seed, are disjoint: all their images are in their own task.
- Of every other class, round(M * images) of its training images, but never all, are drawn by the seed, and each goes
  to one of the other tasks, all of them equally probable. So the number that a task gets is random.

Different in the paper: how many classes a task has is drawn as well (here a task file may say so); how many images a
task gives away is drawn; and an image that is drawn may return to its own task, so that fewer than M leave it.

The draw of a class depends on the seed, on its number in the data set and on the number of its images and tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protosteer.errors import DataError

Rows = list[np.ndarray]  # by class number, each in file order


def share_out(
    rows: Rows, groups: Sequence[Sequence[int]], blurry: float, disjoint: float, seed: int
) -> list[Rows]:
    """The rows of each class in each task. groups: the numbers of the classes that each task has as its own."""
    if blurry and len(groups) < 2:
        raise DataError("blurry task boundaries need at least 2 tasks")
    own = sorted(k for group in groups for k in group)
    fixed = set(_draw(seed, 0).permutation(own)[: round(disjoint * len(own))].tolist())
    shared = [[some[:0] for some in rows] for _ in groups]
    for home, group in enumerate(groups):
        others = np.array([task for task in range(len(groups)) if task != home])
        for k in group:
            places = np.full(len(rows[k]), home)
            if blurry and k not in fixed:
                draw = _draw(seed, 1 + k)
                leaving = draw.permutation(len(places))[: min(round(blurry * len(places)), len(places) - 1)]
                places[leaving] = draw.choice(others, len(leaving))
            for task in range(len(groups)):
                shared[task][k] = rows[k][places == task]
    return shared


def _draw(seed: int, what: int) -> np.random.RandomState:
    return np.random.RandomState([seed, what])
