"""Several folders at once, each taught by itself in a process of its own, and put together in their order.

An independent task depends on its own images, the settings, the backbone and the prompt for all classes, if there
is one; not on what was learned before it. So its record is the same to the bit wherever and whenever it is made.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from protosteer.data.class_folders import Files
from protosteer.data.sources import read_labelled
from protosteer.errors import LearnerError, ModelFileError
from protosteer.learner import Learner
from protosteer.model.file import Model, read
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.executor import Executor, Job
from protosteer.util.files import write_atomically
from protosteer.workflows.known_files import Again, file_digests
from protosteer.workflows.learn_folder import (
    FolderScan,
    LearnResult,
    checkpoint_path,
    file_version,
    learn_folder,
    own_name,
    scan_folder,
    unfinished_task,
)
from protosteer.workflows.learner_spec import Carried


@dataclass(frozen=True)
class TaskData:
    """A folder that is to become a task of that name, with these of its classes."""

    folder: Path
    name: str
    classes: tuple[str, ...]

    def files(self) -> Files:
        return read_labelled(self.folder, self.classes)


# Is given a lesson, with what was found in its folder and taught; None if an earlier call had taught it.
OnLearned = Callable[[TaskData, "tuple[FolderScan, LearnResult] | None"], None]


def plan(
    memory: Memory, folders: Sequence[Path], skip_known: bool = False
) -> tuple[list[TaskData], list[Path]]:
    """What is to be learned of each folder, and those folders that are tasks already.

    Names and classes are what they would be if one folder was learned after the other.
    """
    owners = set(memory.classes)
    lessons: list[TaskData] = []
    there: list[Path] = []
    for folder in folders:
        classes = list(dict.fromkeys(read_labelled(folder).labels))
        if _learned(memory, folder, classes):
            there.append(folder)
            continue
        begun = unfinished_task(memory, folder, classes, None)
        own = classes
        if skip_known:
            own = begun.class_names if begun else [c for c in classes if c not in owners]
        if not own:
            raise LearnerError(f"every class of {folder} is known already; there is nothing to learn")
        name = begun.name if begun else memory.free_name(own_name(folder), [x.name for x in lessons])
        owners |= {*own}
        lessons.append(TaskData(folder, name, tuple(own)))
    return lessons, there


def _learned(memory: Memory, folder: Path, classes: Sequence[str]) -> bool:
    """Whether finished tasks of the folder's name, perhaps with a number, have just these classes and images."""
    mine = re.compile(rf"{re.escape(own_name(folder))}(-\d+)?")
    tasks = [task for task in memory.tasks if mine.fullmatch(task.name) and not task.metadata.unfinished]
    if not any(set(task.class_names) == set(classes) for task in tasks):
        return False
    files = read_labelled(folder)
    return len(Again.find(tasks, files, file_digests(files.paths)).same) == len(files)


def teach_apart(
    engine: Executor,
    learner: Learner,
    lessons: Sequence[TaskData],
    model: Path,
    holdout: float,
    device: str,
    on_learned: OnLearned = lambda lesson, outcome: None,
) -> tuple[list[TaskRecord], list[Path]]:
    """The records of all lessons, in their order, and the files beside the model that they are kept in.

    A call that was stopped finds there what was done. Whoever has put the records into the model removes them.
    """
    refuse_dependent(learner, lessons)
    records: dict[TaskData, TaskRecord] = {}
    kept: list[Path] = []
    # By the preset for one prompt, whether a task trains it depends on whether it is the first.
    alone = learner.settings.prompt_tasks == "first" and not len(learner.memory)
    for some in [lessons[:1], lessons[1:]] if alone else [lessons]:
        basis = learner.copy()
        for record in records.values():
            basis.memory.add(record)
        places = {lesson: _place(model, basis, lesson, holdout) for lesson in some}
        kept += places.values()
        records |= _teach_all(engine, basis, places, model, holdout, device, on_learned)
    return [records[lesson] for lesson in lessons], kept


def refuse_dependent(learner: Learner, lessons: Sequence[TaskData]) -> None:
    if not learner.settings.independent:
        raise LearnerError(
            "these tasks would depend on one another, so they cannot be learned at once: learn each by itself, with "
            "independent=True, or one after the other"
        )
    for lesson in lessons:
        if unfinished_task(learner.memory, lesson.folder, lesson.classes, lesson.name):
            raise LearnerError(
                f"task '{lesson.name}' is unfinished; finish it first, by learning {lesson.folder} alone"
            )


def _teach_all(
    engine: Executor,
    basis: Learner,
    places: dict[TaskData, Path],
    model: Path,
    holdout: float,
    device: str,
    on_learned: OnLearned,
) -> dict[TaskData, TaskRecord]:
    records: dict[TaskData, TaskRecord] = {}
    for lesson, place in places.items():
        with suppress(ModelFileError):  # it is not there, or damaged: then it is learned again
            records[lesson] = read(place).memory.tasks[0]
            on_learned(lesson, None)

    def on_done(job: Job, outcome: tuple[FolderScan, LearnResult]) -> None:
        (lesson,) = job.arguments
        about = basis.model
        part = Model(places[lesson], about.backbone, about.settings, Memory([outcome[1].record]))
        write_atomically(places[lesson], part.pack())
        records[lesson] = read(places[lesson]).memory.tasks[0]
        on_learned(lesson, outcome)

    jobs = [Job(f"folder {lesson.folder}", (lesson,)) for lesson in places if lesson not in records]
    engine.run(functools.partial(_teacher, Carried.of(basis, device), model, holdout), jobs, on_done)
    return records


def _teacher(
    carried: Carried, model: Path, holdout: float
) -> Callable[[TaskData], tuple[FolderScan, LearnResult]]:
    learner = carried.learner()

    def work(lesson: TaskData) -> tuple[FolderScan, LearnResult]:
        found = scan_folder(lesson.folder, learner.memory, files=lesson.files(), name=lesson.name)
        # Where the model's folder cannot be seen from here, a training that is cut off begins again.
        place = checkpoint_path(model, found, learner, lesson.name, holdout)
        checkpoint = CheckpointFile(place) if model.parent.is_dir() else None
        taught = learn_folder(learner.copy(), found, lesson.name, holdout, checkpoint=checkpoint)
        if checkpoint:
            checkpoint.clear()
        return found, taught

    return work


def _place(model: Path, basis: Learner, lesson: TaskData, holdout: float) -> Path:
    """Beside the model, for a record of just these files and circumstances."""
    backbone, memory, domain = basis.backbone, basis.memory, basis.domain
    what = [
        lesson.name,
        lesson.classes,
        holdout,
        basis.settings,
        backbone.fingerprint,
        backbone.preprocessing,
    ]
    what += [len(memory) > 0, memory.evidence, None if domain is None else domain.numpy().tobytes()]
    digest = hashlib.sha256(repr(what).encode())
    files = lesson.files()
    for path, label in zip(files.paths, files.labels, strict=True):
        digest.update(repr((str(path.resolve()), label, *file_version(path))).encode())
    return model.parent / f".{model.name}.{digest.hexdigest()[:16]}.part"
