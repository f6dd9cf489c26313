"""Who listens to a training: see `method.training.Listener`."""

from __future__ import annotations

from typing import Any

from protosteer.method.training import Listener
from protosteer.running.progress import OnStage, TrainingProgress
from protosteer.running.resume import Bookmark, Resume


def listeners(
    task: str, which: dict[str, Any], on_stage: OnStage | None, bookmark: Bookmark | None
) -> list[Listener]:
    """One that keeps the training, if there is a bookmark, and one that tells of it, if anyone wants to hear.

    which: tells this training from any other. What is put back must be there before progress is counted.
    """
    heard: list[Listener] = [Resume(bookmark, which)] if bookmark else []
    return heard + ([TrainingProgress(task, on_stage)] if on_stage else [])
