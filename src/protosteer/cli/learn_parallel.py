"""`protosteer learn --engine ray`: folders are learned in parallel, each on a worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protosteer.cli.common import progress, say
from protosteer.cli.loading import LearnerFactory, check_writable, read_model
from protosteer.cli.scanning import model_size
from protosteer.util.files import real, writing
from protosteer.util.text import counted

if TYPE_CHECKING:
    from protosteer.model.file import Model
    from protosteer.runtime.executor import Executor
    from protosteer.workflows.folder_scan import FolderScan
    from protosteer.workflows.learn_folder import LearnResult
    from protosteer.workflows.parallel_learn import TaskPlan


ANOTHER = "another MODEL"  # the advice if a path cannot be written


def plan_folders(model: Model | None, folders: Sequence[Path], skip_known: bool) -> list[TaskPlan]:
    """Plan a task for each folder that is none yet; a folder that cannot be learned rejects all now."""
    from protosteer.model.memory import Memory
    from protosteer.workflows.parallel_learn import plan_tasks

    plans, complete_folders = plan_tasks(model.memory if model else Memory(), folders, skip_known)
    for folder in complete_folders:
        say(f"nothing new in {folder}; skipped")
    return plans


def learn_folders_in_parallel(
    engine: Executor, path: Path, folders: Sequence[Path], skip_known: bool, learners: LearnerFactory
) -> list[dict[str, Any]]:
    """Learn each folder on a worker, then write all tasks at once, in the order of the folders."""
    from protosteer.data.class_folders import split_readable
    from protosteer.report.learn import as_json
    from protosteer.runtime.progress import Stage
    from protosteer.workflows.learn_folder import held_count
    from protosteer.workflows.parallel_learn import learn_in_parallel, refuse_dependent
    from protosteer.workflows.task_writer import put_tasks

    held_count(0, learners.holdout)  # rejects a bad holdout before anything is started
    model = read_model(path)
    plans = plan_folders(model, folders, skip_known)
    if not plans:
        say(f"{path}: nothing is left to learn")
        return []
    learner = learners.make(model, lambda: split_readable(plans[0].files())[0])
    refuse_dependent(learner, plans)
    check_writable(path, ANOTHER)  # an earlier command's files there are still needed
    results: dict[Path, dict[str, Any]] = {}
    with progress() as on_stage:

        def on_learned(plan: TaskPlan, outcome: tuple[FolderScan, LearnResult] | None) -> None:
            results[plan.folder] = as_json(*outcome) if outcome else {"task": {"name": plan.name}}
            accuracy = outcome[1].accuracy if outcome else None
            among = f", self-check {accuracy} among its own classes and older ones" if accuracy else ""
            result = f"learned as task {plan.name}{among}" if outcome else "was learned before an earlier stop"
            say(f"{plan.folder}: {result}")
            on_stage(Stage("", "folders", len(results), len(plans)))

        try:
            with writing(path, ANOTHER):
                device = learners.choice.loading.device
                records, parts = learn_in_parallel(
                    engine, learner, plans, real(path), learners.holdout, device, on_learned, learners.may_skip
                )
                put_tasks(path, learner, records)
        except KeyboardInterrupt:
            say(f"stopped; {path} is as it was; the same command learns the folders that are left")
            raise
    for part in parts:
        part.unlink(missing_ok=True)
    say(f"Written: {path}: {model_size(learner.memory)}; {counted(len(records), 'task')} new")
    return [results[plan.folder] for plan in plans]
