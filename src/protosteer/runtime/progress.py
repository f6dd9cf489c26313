"""Messages for whoever shows progress: what is being done, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from protosteer.util.training_state import TrainingState


@dataclass(frozen=True)
class Progress:
    """Where training stands. Loss and accuracy are means over the epoch named."""

    epoch: int
    epochs: int
    step: int  # counted over the whole task
    steps: int
    loss: float
    accuracy: float | None  # percent of the last whole epoch's images nearest to their own class mean
    images_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Stage:
    """One of the things that are done for a task, and how much of it is done."""

    task: str
    doing: str  # such as "keys", "training", "values", "testing"
    done: int
    total: int
    training: Progress | None = None


OnStage = Callable[[Stage], None]


class TrainingProgress:
    """A callback that tells of every step of a task's training."""

    def __init__(self, task: str, on_stage: OnStage):
        self.task = task
        self.on_stage = on_stage
        self.first = 0
        self.began = time.perf_counter()

    def on_train_begin(self, training: TrainingState) -> None:
        """Comes after what an interrupted process had done was put back: it took no time now."""
        self.first, self.began = training.step, time.perf_counter()

    def on_step_end(self, training: TrainingState) -> None:
        rate = (training.step - self.first) / (time.perf_counter() - self.began)
        progress = Progress(
            epoch=training.epoch + 1,
            epochs=training.steps // training.steps_per_epoch,
            step=training.step,
            steps=training.steps,
            loss=sum(training.losses) / len(training.losses),
            accuracy=training.history[-1].accuracy if training.history else None,
            images_per_second=rate * len(training.batches[0]),
            seconds_left=(training.steps - training.step) / rate,
        )
        self.on_stage(Stage(self.task, "training", training.step, training.steps, progress))
