"""Callbacks of a training: save and resume it, report its progress. See `util.training_state.Callback`."""

from __future__ import annotations

import time
from typing import Any

import torch

from protosteer.errors import TrainingError
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage, Progress, Stage
from protosteer.util.text import one_line
from protosteer.util.training_state import Callback, TrainingState


def training_callbacks(
    task: str, run_key: dict[str, Any], on_stage: OnStage | None, checkpoint: CheckpointFile | None
) -> list[Callback]:
    """Return the callbacks of a task's training."""
    # Resuming comes first: progress counts the steps that are made now.
    callbacks: list[Callback] = [CheckpointCallback(checkpoint, run_key)] if checkpoint else []
    return callbacks + ([ProgressCallback(task, on_stage)] if on_stage else [])


class CheckpointCallback:
    """Save a training between two steps; when it begins, resume it from the file if that has the same `run_key`."""

    def __init__(self, checkpoint: CheckpointFile, run_key: dict[str, Any]):
        self.checkpoint = checkpoint
        self.run_key = run_key
        self.earlier_seconds = 0.0  # of interrupted processes
        self.began = time.perf_counter()

    def on_train_begin(self, state: TrainingState) -> None:
        """Resume: bit-identical to the state at `save`."""
        saved_state = self.checkpoint.load()
        if saved_state is None or saved_state[1].get("which") != self.run_key:
            return
        tensors, metadata = saved_state
        try:
            state.load_state_dict(tensors, metadata["notes"])
            adam = isinstance(state.optimiser, (torch.optim.Adam, torch.optim.AdamW))
            absent_keys = {"step", "exp_avg", "exp_avg_sq"}.difference(metadata["moments"]) if adam else ()
            if absent_keys:
                raise KeyError(min(absent_keys))
            for name, parameter in state.parameters.items():
                parameter.data.copy_(tensors[name])
                moments = {key: tensors[f"{name}/{key}"] for key in metadata["moments"]}
                state.optimiser.state[parameter] = {
                    key: value.float().reshape(()) if key == "step" else torch.empty_like(parameter).copy_(value)
                    for key, value in moments.items()
                }
            state.generator.set_state(tensors["rng"])
            self.earlier_seconds = float(metadata["seconds"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            message = (
                f"{self.checkpoint.path} does not hold what this training needs ({one_line(str(error))}); remove it"
            )
            raise TrainingError(message, code="bad-checkpoint", path=self.checkpoint.path) from error

    def on_step_end(self, state: TrainingState) -> None:
        """Save the training if a checkpoint is due."""
        if self.checkpoint.is_due():
            self.save(state)

    def save(self, state: TrainingState) -> None:
        """Write parameters, optimiser, random state and position to the file."""
        tensors, notes = state.state_dict()
        tensors = {**tensors, "rng": state.generator.get_state()}
        moments: list[str] = []
        for name, parameter in state.parameters.items():
            tensors[name] = parameter.detach()
            optimiser_state = state.optimiser.state[parameter]
            moments = list(optimiser_state)
            tensors |= {f"{name}/{key}": value for key, value in optimiser_state.items()}
        seconds = self.earlier_seconds + time.perf_counter() - self.began
        metadata = {"notes": notes, "moments": moments, "seconds": seconds, "which": self.run_key}
        self.checkpoint.save(tensors, metadata)


class ProgressCallback:
    """Report every step of a task's training."""

    def __init__(self, task: str, on_stage: OnStage):
        self.task = task
        self.on_stage = on_stage
        self.first = 0
        self.began = time.perf_counter()

    def on_train_begin(self, state: TrainingState) -> None:
        """Start the clock; report the steps that were resumed from a file, which took no time."""
        self.first, self.began = state.step, time.perf_counter()
        if state.step:
            self.on_step_end(state)

    def on_step_end(self, state: TrainingState) -> None:
        """Report a step."""
        rate = (state.step - self.first) / (time.perf_counter() - self.began)
        progress = Progress(
            epoch=state.epoch + 1,
            epochs=state.steps // state.steps_per_epoch,
            step=state.step,
            steps=state.steps,
            losses=(*(epoch.loss for epoch in state.history), sum(state.losses) / len(state.losses)),
            accuracy=state.history[-1].accuracy if state.history else None,
            images_per_second=rate * len(state.batches[0]),
            seconds_left=(state.steps - state.step) / rate if rate else 0.0,
        )
        self.on_stage(Stage(self.task, "training", state.step, state.steps, progress))
