"""Write learned tasks into a model file that others may change while tasks are learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from protosteer.errors import LearnerError
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.model.transaction import Transaction, transaction
from protosteer.model.unlearning import lost_influence
from protosteer.util.files import identity
from protosteer.workflows.learn_folder import LearnResult


def put_tasks(path: Path, learner: Learner, records: Sequence[TaskRecord]) -> None:
    """Add tasks that were learned in other processes to a model file, all at once.

    Args:
        path: The model file. If there is none, the learner's own tasks are written too.
        learner: Gets the tasks of the file, and the new ones.
        records: The new tasks; those whose names are taken get a number.
    """
    with transaction(path, "learn") as change:
        _refresh(learner, change)
        for record in records:
            learner.memory.add(dataclasses.replace(record, name=learner.memory.free_name(record.name)))
        change.put(learner.model)


class TaskWriter:
    """Writes one task into a model file, unfinished and finished. Make it before you read the file.

    Attributes:
        unfinished: Name of the task in the file while its prompt is not trained yet.
    """

    def __init__(self, path: Path, name: str | None, say: Callable[[str], None]):
        """Record the version of the file.

        Args:
            path: The model file, which need not exist.
            name: Name of the task if the user chose it; else it may get a number.
            say: Called with what others changed meanwhile.
        """
        self.path, self.name, self.say = path, name, say
        self.unfinished: str | None = None
        self._identity = identity(path)

    def put(self, learner: Learner, result: LearnResult) -> LearnResult:
        """Write the learner's model; if there is a file, its current tasks and the new one.

        Args:
            learner: Knows the new task; gets the tasks of the file.
            result: The new task.

        Returns:
            The task as it was written.
        """
        command, keep = ("learn, finished", None) if self.unfinished else ("learn", 0)
        with transaction(self.path, command, keep) as change:
            if change.identity != self._identity:
                self.say(f"{self.path} {_what_happened(change.identity)}")
            earlier_tasks = learner.memory.tasks[: learner.tasks.index(result.record.name)]
            if _refresh(learner, change):
                result = dataclasses.replace(result, record=self._add(learner.memory, result.record, earlier_tasks))
            change.put(learner.model)
        self._identity = change.identity
        self.unfinished = result.record.name if result.record.metadata.unfinished else None
        return result

    def _add(self, memory: Memory, record: TaskRecord, earlier_tasks: Sequence[TaskRecord]) -> TaskRecord:
        """Put a task at the end, or in the place of its unfinished form."""
        if self.unfinished is None:
            if self.name is None:  # the folder's name was free when learning began
                record = dataclasses.replace(record, name=memory.free_name(record.name))
            memory.add(record)
        else:
            unfinished = self._find_unfinished(memory)
            record = self._without_forgotten(dataclasses.replace(record, name=self.unfinished), unfinished)
            memory.replace(unfinished, record)
        if not record.metadata.unfinished and (warning := lost_influence(record, earlier_tasks, memory)):
            self.say(f"warning: {warning}")
        return record

    def _find_unfinished(self, memory: Memory) -> TaskRecord:
        for task in memory.tasks:
            if task.name == self.unfinished and task.metadata.unfinished:
                return task
        message = (
            f"task '{self.unfinished}' was forgotten, or finished, by someone else meanwhile; {self.path} stays as "
            "it is now"
        )
        raise LearnerError(message, code="task-gone", name=self.unfinished)

    def _without_forgotten(self, record: TaskRecord, unfinished: TaskRecord) -> TaskRecord:
        """Keep the classes that the unfinished form still has."""
        forgotten = [name for name in record.class_names if name not in unfinished.class_names]
        if forgotten and record.prompt is not None:
            self.say(
                f"warning: '{forgotten[0]}' was forgotten meanwhile and is left out, but the prompt of task "
                f"'{record.name}' was trained with its images; to remove that too, forget this task and learn it again"
            )
        return dataclasses.replace(record, classes=record.classes.without(forgotten))


def _refresh(learner: Learner, change: Transaction) -> bool:
    """Give the learner the tasks of the file, if there is one; another backbone's file is rejected."""
    if change.identity is None:
        return False
    learner.memory = Learner.of_model(change.read(), learner.backbone).memory
    return True


def _what_happened(identity: tuple[int, ...] | None) -> str:
    if identity is None:
        return "was deleted meanwhile; it is written again, with all that it held when learning began"
    return "was changed by someone else meanwhile; the task goes into what is there now"
