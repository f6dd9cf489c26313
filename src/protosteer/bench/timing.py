"""Ratios of times on a machine that others use too: both sides in turn, medians, and how far repeats differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Side = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """How many times as long the reference takes as ours does."""

    name: str
    about: str  # what is measured against what, for a person
    value: float
    target: float
    spread: float  # greatest minus smallest ratio over the repeats
    notes: list[str] = field(default_factory=list)  # absolute rates and the like, as information only

    @classmethod
    def of(
        cls,
        name: str,
        about: str,
        reference: Sequence[float],
        ours: Sequence[float],
        target: float,
        notes: Sequence[str] = (),
    ) -> Ratio:
        """From the seconds of each repeat; repeat i of one side ran beside repeat i of the other."""
        each = [slow / quick for slow, quick in zip(reference, ours, strict=True)]
        value = median(reference) / median(ours)
        return cls(name, about, value, target, max(each) - min(each), list(notes))

    @property
    def met(self) -> bool:
        return self.value >= self.target


def interleaved(sides: Mapping[Name, Side], repeats: int, warm_up: bool = True) -> dict[Name, list[float]]:
    """Seconds of each repeat of each side. All sides run once before any runs again, in turning order."""
    if warm_up:
        for side in sides.values():
            side()
    times: dict[Name, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            begin = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - begin)
    return times
