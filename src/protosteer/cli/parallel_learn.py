"""Several folders in one command: those still to be learned, and all of them at once, on workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protosteer.cli.common import make_console, say, sigterm_as_ctrl_c
from protosteer.cli.loading import check_writable, read_model
from protosteer.cli.saving import ANOTHER, put_tasks

if TYPE_CHECKING:
    from protosteer.data.class_folders import Files
    from protosteer.learner import Learner
    from protosteer.model.file import Model
    from protosteer.runtime.executor import Executor
    from protosteer.workflows.learn_folder import FolderScan, LearnResult
    from protosteer.workflows.parallel_learn import TaskData

    # The learner of a model, or a new one, whose backbone suits these files.
    LearnerOf = Callable[[Model | None, Callable[[], Files]], Learner]


def to_learn(path: Path, folders: Sequence[Path], skip_known: bool) -> list[Path]:
    """Folders that are no tasks yet; what would refuse one of them later refuses all now."""
    return [lesson.folder for lesson in _lessons(read_model(path), folders, skip_known)]


def _lessons(old: Model | None, folders: Sequence[Path], skip_known: bool) -> list[TaskData]:
    from protosteer.model.memory import Memory
    from protosteer.workflows.parallel_learn import plan

    lessons, there = plan(old.memory if old else Memory(), folders, skip_known)
    for folder in there:
        say(f"{folder} is a task already, with the same classes; it is left out")
    return lessons


def learn_apart(
    engine: Executor,
    path: Path,
    folders: Sequence[Path],
    holdout: float,
    skip_known: bool,
    device: str,
    learner_of: LearnerOf,
) -> list[dict[str, Any]]:
    """Teach each folder by itself on a worker, then write all tasks, in the order of the folders, at once."""
    from protosteer.data.class_folders import readable
    from protosteer.report.learn import as_json as figures
    from protosteer.report.progress import LearnProgress
    from protosteer.runtime.progress import Stage
    from protosteer.util.files import real, writing
    from protosteer.util.text import counted
    from protosteer.workflows.learn_folder import held_count
    from protosteer.workflows.parallel_learn import refuse_dependent, teach_apart

    held_count(0, holdout)  # complains before anything is started
    old = read_model(path)
    lessons = _lessons(old, folders, skip_known)
    if not lessons:
        say(f"{path}: nothing is left to learn")
        return []
    learner = learner_of(old, lambda: readable(lessons[0].files())[0])
    refuse_dependent(learner, lessons)
    check_writable(path, ANOTHER)  # what an earlier command has left there is still needed
    told: dict[Path, dict[str, Any]] = {}
    with LearnProgress(make_console(stderr=True)) as progress:

        def on_learned(lesson: TaskData, outcome: tuple[FolderScan, LearnResult] | None) -> None:
            told[lesson.folder] = figures(*outcome) if outcome else {"task": {"name": lesson.name}}
            say(_learned(lesson, outcome))
            progress.on_stage(Stage("", "folders", len(told), len(lessons)))

        try:
            with sigterm_as_ctrl_c(), writing(path, ANOTHER):
                records, kept = teach_apart(engine, learner, lessons, real(path), holdout, device, on_learned)
                put_tasks(path, learner, records)
        except KeyboardInterrupt:
            say(f"stopped; {path} is as it was; the same command goes on with the folders that are left")
            raise
    for place in kept:
        place.unlink(missing_ok=True)
    tasks = f"{counted(len(records), 'task')} new"
    say(
        f"Written: {path}: {counted(len(learner.classes), 'class')} in {counted(len(learner.memory), 'task')}; {tasks}"
    )
    return [told[lesson.folder] for lesson in lessons]


def _learned(lesson: TaskData, outcome: tuple[FolderScan, LearnResult] | None) -> str:
    if outcome is None:
        return f"{lesson.folder}: had been learned when an earlier command was stopped"
    check = outcome[1].check
    among = f", self-check {check.accuracy:.1f} % among its own classes and older ones" if check else ""
    return f"{lesson.folder}: learned as task {lesson.name}{among}"
