"""Progress reports: the current stage of a task, and the share that is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Progress of a training. Losses and accuracy are means over an epoch."""

    epoch: int
    epochs: int
    step: int  # counted over the whole task
    steps: int
    losses: tuple[float, ...]  # of each epoch, the current one last
    accuracy: float | None  # percent of the last whole epoch's images nearest to their own class mean
    images_per_second: float
    seconds_left: float

    @property
    def loss(self) -> float:
        """The loss of the current epoch."""
        return self.losses[-1]


@dataclass(frozen=True)
class Stage:
    """One stage of learning a task, and how much of it is done."""

    task: str
    doing: str  # such as "keys", "training", "values", "testing"
    done: int
    total: int
    training: Progress | None = None


OnStage = Callable[[Stage], None]


def counting(on_stage: OnStage | None, task: str, doing: str, total: int) -> Callable[[int], None]:
    """Return a function that reports how many of `total` are done to `on_stage`, if there is one."""

    def report(done: int) -> None:
        if on_stage:
            on_stage(Stage(task, doing, done, total))

    return report


def call_both(on_stage: OnStage, listener: OnStage | None) -> OnStage:
    """Return a callback that calls `on_stage`, then `listener` if there is one."""

    def report(stage: Stage) -> None:
        on_stage(stage)
        if listener:
            listener(stage)

    return report
