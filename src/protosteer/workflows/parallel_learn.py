"""Plan several folders as tasks, and learn independent ones in parallel, each in a process of its own.

An independent task depends on its own images, the settings, the backbone and the shared prompt, if there is one;
not on what was learned before. So its record is bit-identical wherever and whenever it is learned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from protosteer.data.class_folders import Files
from protosteer.data.sources import read_labelled
from protosteer.errors import LearnerError, ModelFileError
from protosteer.learner import Learner
from protosteer.model.file import read
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.executor import Executor, Job
from protosteer.util.files import write_atomically
from protosteer.workflows.folder_scan import FolderScan, default_name, names_folder, scan_folder, unfinished_task
from protosteer.workflows.known_files import KnownFiles, digests_of
from protosteer.workflows.learn_folder import LearnResult, TaskSlot, files_checksum, part_path
from protosteer.workflows.learner_spec import LearnerSpec


@dataclass(frozen=True)
class TaskPlan:
    """A folder to learn as a task: its name, and the classes of the folder that it gets."""

    folder: Path
    name: str
    classes: tuple[str, ...]

    def files(self) -> Files:
        """Return the image files of the planned classes."""
        return read_labelled(self.folder, self.classes)


# Called with a plan, and the scan and result of its folder; None if an earlier call had learned it.
OnLearned = Callable[[TaskPlan, "tuple[FolderScan, LearnResult] | None"], None]


def plan_tasks(memory: Memory, folders: Sequence[Path], skip_known: bool = False) -> tuple[list[TaskPlan], list[Path]]:
    """Plan a task per folder, with the names and classes that learning one after the other would give.

    Args:
        memory: What the model knows.
        folders: Folders of class folders, lists or saved image sets.
        skip_known: Skip classes that the model, or an earlier folder, has.

    Returns:
        The plans, and folders without anything new.
    """
    owners = set(memory.classes)
    plans: list[TaskPlan] = []
    already_done: list[Path] = []
    for folder in folders:
        files = read_labelled(folder)
        classes = list(dict.fromkeys(files.labels))
        if _is_learned(memory, folder, files):
            already_done.append(folder)
            continue
        unfinished = unfinished_task(memory, folder, classes, None)
        task_classes = classes
        if skip_known:
            task_classes = unfinished.class_names if unfinished else [c for c in classes if c not in owners]
        if not task_classes:
            already_done.append(folder)
            continue
        name = unfinished.name if unfinished else memory.free_name(default_name(folder), [plan.name for plan in plans])
        owners |= {*task_classes}
        plans.append(TaskPlan(folder, name, tuple(task_classes)))
    return plans, already_done


def _is_learned(memory: Memory, folder: Path, files: Files) -> bool:
    """Return whether finished tasks named after the folder have exactly these classes and images."""
    tasks = [task for task in memory.tasks if names_folder(task, folder) and not task.metadata.unfinished]
    if not any(set(task.class_names) == set(files.labels) for task in tasks):
        return False
    return len(KnownFiles.find(tasks, files, digests_of(files.paths)).same_class) == len(files)


def learn_in_parallel(
    engine: Executor,
    learner: Learner,
    plans: Sequence[TaskPlan],
    model: Path,
    holdout: float,
    device: str,
    on_learned: OnLearned = lambda plan, outcome: None,
    may_skip: bool = False,
) -> tuple[list[TaskRecord], list[Path]]:
    """Learn planned tasks on the workers of an executor.

    Args:
        engine: The executor.
        learner: Knows what the model knows; it does not change.
        plans: The tasks.
        model: The model file, beside which finished records wait. A call that was stopped finds them there.
        holdout: Share of each class's images that judges training, see `learn_folder`.
        device: Where workers compute.
        on_learned: Is called after each task.
        may_skip: Skip training where it cannot gain much.

    Returns:
        The records in the order of the plans, and the files they wait in. Remove these once the model has them.

    Raises:
        LearnerError: The tasks depend on one another, or one is unfinished.
    """
    refuse_dependent(learner, plans)
    records: dict[TaskPlan, TaskRecord] = {}
    parts: list[Path] = []
    options = holdout, may_skip
    # With one prompt for all tasks, whether a task trains it depends on whether it is the first.
    first_alone = learner.settings.prompt_tasks == "first" and not len(learner.memory)
    for group in [plans[:1], plans[1:]] if first_alone else [plans]:
        base_learner = learner.copy()
        for record in records.values():
            base_learner.memory.add(record)
        places = {plan: _part_path(model, base_learner, plan, options) for plan in group}
        parts += places.values()
        records |= _learn_group(engine, base_learner, places, model, options, device, on_learned)
    return [records[plan] for plan in plans], parts


def refuse_dependent(learner: Learner, plans: Sequence[TaskPlan]) -> None:
    """Raise a LearnerError if planned tasks cannot be learned in parallel."""
    if not learner.settings.independent:
        raise LearnerError(
            "these tasks would depend on one another, so they cannot be learned in parallel: set independent=True, "
            "or learn one after the other",
            code="dependent-tasks",
        )
    for plan in plans:
        if unfinished_task(learner.memory, plan.folder, plan.classes, plan.name):
            message = f"task '{plan.name}' is unfinished; finish it first, by learning {plan.folder} alone"
            raise LearnerError(message, code="unfinished-task", name=plan.name)


def _learn_group(
    engine: Executor,
    base_learner: Learner,
    places: dict[TaskPlan, Path],
    model: Path,
    options: tuple[float, bool],
    device: str,
    on_learned: OnLearned,
) -> dict[TaskPlan, TaskRecord]:
    records: dict[TaskPlan, TaskRecord] = {}
    for plan, place in places.items():
        with suppress(ModelFileError):  # absent or damaged: learned again
            records[plan] = read(place).memory.tasks[0]
            on_learned(plan, None)

    def on_done(job: Job, outcome: tuple[FolderScan, LearnResult]) -> None:
        (plan,) = job.arguments
        part = dataclasses.replace(base_learner.model, memory=Memory([outcome[1].record]))
        write_atomically(places[plan], part.pack())
        records[plan] = read(places[plan]).memory.tasks[0]
        on_learned(plan, outcome)

    jobs = [Job(f"folder {plan.folder}", (plan,)) for plan in places if plan not in records]
    engine.run(functools.partial(_worker, LearnerSpec.of(base_learner, device), model, *options), jobs, on_done)
    return records


def _worker(
    spec: LearnerSpec, model: Path, holdout: float, may_skip: bool
) -> Callable[[TaskPlan], tuple[FolderScan, LearnResult]]:
    learner = spec.learner()

    def work(plan: TaskPlan) -> tuple[FolderScan, LearnResult]:
        scan = scan_folder(
            plan.folder,
            learner.memory,
            files=plan.files(),
            name=plan.name,
            preprocessing=learner.backbone.preprocessing,
        )
        slot = TaskSlot.prepare(learner, scan, plan.name, holdout)
        # If this worker does not see the model's folder, interrupted training begins again.
        checkpoint = CheckpointFile(slot.checkpoint_path(model)) if model.parent.is_dir() else None
        _, result = slot.learn(checkpoint=checkpoint, may_skip=may_skip)
        if checkpoint:
            checkpoint.clear()
        return scan, result

    return work


def _part_path(model: Path, base_learner: Learner, plan: TaskPlan, options: tuple[float, bool]) -> Path:
    """Return the path of a finished record beside the model; its name depends on all that the record depends on."""
    backbone, memory, prompt = base_learner.backbone, base_learner.memory, base_learner.shared_prompt
    key = [plan.name, plan.classes, options, base_learner.settings, backbone.fingerprint]
    key += [backbone.precision, backbone.preprocessing, len(memory) > 0, memory.evidence]
    key.append(None if prompt is None else prompt.numpy().tobytes())
    return part_path(model, files_checksum(key, plan.files()).hexdigest())
