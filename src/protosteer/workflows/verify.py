"""Verify a model after forgetting: relearn its independent tasks from their folders and compare bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protosteer.data.sources import read_labelled
from protosteer.learner import Learner
from protosteer.model.certificate import record_hash
from protosteer.runtime.progress import OnStage
from protosteer.settings import Settings
from protosteer.workflows.folder_scan import names_folder, scan_folder
from protosteer.workflows.learn_folder import learn_folder


def relearn(
    learner: Learner, folders: Sequence[Path], on_stage: OnStage | None = None
) -> list[tuple[bool | None, str]]:
    """Learn folders again, each as the task that is named after it, and compare with the model.

    A task that was learned independently depends on its own images alone. If learning the remaining
    classes gives the same bits, the task has no influence of a forgotten class.

    Returns:
        For each folder whether the bits are the same, None if that cannot be checked, and a sentence.
    """
    return [_compare(learner, folder, on_stage) for folder in folders]


def _compare(learner: Learner, folder: Path, on_stage: OnStage | None) -> tuple[bool | None, str]:
    task = next((task for task in learner.memory.tasks if names_folder(task, folder)), None)
    if task is None:
        return None, f"{folder}: no task is named after it"
    if not task.independent or task.metadata.settings is None:
        return None, f"{folder}: task {task.name} depends on other tasks; only independent ones can be checked"
    settings = Settings.from_file(dict(task.metadata.settings)).replace(prompts=task.prompt is not None)
    task_learner = Learner(learner.backbone, settings, task.shared_prompt)
    files = read_labelled(folder, task.class_names)
    scan = scan_folder(folder, files=files, name=task.name, preprocessing=learner.backbone.preprocessing)
    record = learn_folder(task_learner, scan, task.name, on_stage=on_stage).record
    is_same = record_hash(record) == record_hash(task)
    return is_same, f"{folder}: task {task.name} learned again, {'the same' if is_same else 'other'} bits"
