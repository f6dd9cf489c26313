"""The callbacks of a training: see `util.training_state.Callback`."""

from __future__ import annotations

from typing import Any

from protosteer.runtime.checkpoint import CheckpointCallback, CheckpointFile
from protosteer.runtime.progress import OnStage, TrainingProgress
from protosteer.util.training_state import Callback


def training_callbacks(
    task: str, which: dict[str, Any], on_stage: OnStage | None, checkpoint: CheckpointFile | None
) -> list[Callback]:
    """One that keeps the training, if there is a checkpoint, and one that tells of it, if anyone wants to hear.

    which: tells this training from any other. What is put back must be there before progress is counted.
    """
    callbacks: list[Callback] = [CheckpointCallback(checkpoint, which)] if checkpoint else []
    return callbacks + ([TrainingProgress(task, on_stage)] if on_stage else [])
