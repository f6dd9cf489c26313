"""What commands put into files while others may do the same: new files, and tasks that are being learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protosteer.cli.common import say

if TYPE_CHECKING:
    from protosteer.learner import Learner
    from protosteer.model.memory import Memory
    from protosteer.model.records import TaskRecord
    from protosteer.util.files import Identity
    from protosteer.workflows.learn_folder import LearnResult

ANOTHER = "another MODEL"  # what to choose where nothing can be written


def refuse_existing(out: Path) -> None:
    from protosteer.errors import ProtosteerError

    if out.exists():
        raise ProtosteerError(
            f"{out} exists already; choose another file with --out", code="file-exists", path=out
        )


def put_new(out: Path, write: Callable[[Path], None]) -> None:
    """Write a file that must not be there yet."""
    from protosteer.util.files import real, replacing, writing

    with writing(out, "--out"):
        real(out).parent.mkdir(parents=True, exist_ok=True)
    with writing(out, "--out"), replacing(real(out)):
        refuse_existing(out)  # again: it was looked for before the work began
        write(out)


def put_tasks(path: Path, learner: Learner, records: Sequence[TaskRecord]) -> None:
    """Add tasks that were learned elsewhere, all at once, to what the file knows now, or to the learner's memory if
    there is none."""
    from protosteer.learner import Learner
    from protosteer.model import file as model_file
    from protosteer.util.files import real, replacing, writing

    with writing(path, ANOTHER), replacing(real(path)):
        if path.exists():
            learner.memory = Learner.of_model(model_file.read(path), learner.backbone).memory
        for record in records:
            learner.memory.add(dataclasses.replace(record, name=learner.memory.free_name(record.name)))
        learner.save(path)


class TaskWriter:
    """Puts one task into a file. Whoever changes the file meanwhile loses nothing.

    Made before the file is read. name: of the task, if it was given; else it may get a number.
    """

    def __init__(self, path: Path, name: str | None):
        from protosteer.util.files import Identity

        self.path, self.name = path, name
        self.identity = Identity.of(path)
        self.begun: str | None = None  # the task as it is in the file, unfinished

    def put(self, learner: Learner, taught: LearnResult) -> LearnResult:
        """Write what the learner knows; if there is a file, the new task into what that one knows now."""
        from protosteer.util.files import Identity, real, replacing, writing

        with writing(self.path, ANOTHER), replacing(real(self.path)):
            now = Identity.of(self.path)
            if now != self.identity:
                say(f"{self.path} {_happened(now)}")
            if now.content is not None:
                taught = self._put_into_latest(learner, taught)
            learner.save(self.path)
            self.identity = Identity.of(self.path)
        self.begun = taught.record.name if taught.record.metadata.unfinished else None
        return taught

    def _put_into_latest(self, learner: Learner, taught: LearnResult) -> LearnResult:
        from protosteer.learner import Learner
        from protosteer.model import file as model_file

        latest = Learner.of_model(model_file.read(self.path), learner.backbone)  # refuses another backbone
        memory, record = latest.memory, taught.record
        trained_after = learner.memory.tasks[: learner.tasks.index(record.name)]
        if self.begun is None:
            if self.name is None:  # the folder's name was free when learning began
                record = dataclasses.replace(record, name=memory.free_name(record.name))
            memory.add(record)
        else:
            there = self._unfinished(memory)
            record = _without_forgotten(dataclasses.replace(record, name=self.begun), there)
            memory.replace(there, record)
        _warn_of_influence(record, trained_after, memory)
        learner.memory = memory
        return dataclasses.replace(taught, record=record)

    def _unfinished(self, memory: Memory) -> TaskRecord:
        from protosteer.errors import LearnerError

        for task in memory.tasks:
            if task.name == self.begun and task.metadata.unfinished:
                return task
        raise LearnerError(
            f"task '{self.begun}' was forgotten, or finished, by someone else meanwhile; {self.path} stays as it "
            "is now",
            code="task-gone",
            name=self.begun,
        )


def _happened(now: Identity) -> str:
    if now.content is None:
        return "was deleted meanwhile; it is written again, with all that it held when learning began"
    return "was changed by someone else meanwhile; the task goes into what is there now"


def _without_forgotten(record: TaskRecord, there: TaskRecord) -> TaskRecord:
    """The record with those classes alone that its unfinished form still has."""
    gone = [name for name in record.class_names if name not in there.class_names]
    if gone and record.prompt is not None:
        say(
            f"warning: '{gone[0]}' was forgotten meanwhile and is left out, but the prompt of task "
            f"'{record.name}' was trained with its images; to remove that too, forget this task and learn it again"
        )
    return dataclasses.replace(record, classes=record.classes.without(gone))


def _warn_of_influence(record: TaskRecord, before: tuple[TaskRecord, ...], memory: Memory) -> None:
    """Say so if the record's prompts were trained with classes that are no longer in the file."""
    import torch

    if record.metadata.unfinished:
        return
    known = set(memory.classes)
    lost = {task.name: [c for c in task.class_names if c not in known] for task in before}
    against = record.prompt is not None and not record.independent
    for task in before:
        domain, prompt = record.shared_prompt, task.prompt
        seen_under = domain is not None and prompt is not None and torch.equal(domain, prompt)
        if lost[task.name] and (against or seen_under):
            say(
                f"warning: '{lost[task.name][0]}' was forgotten meanwhile, but task '{record.name}' has a prompt "
                "that was trained with or against it; to remove that too, forget this task and learn it again"
            )
            return
