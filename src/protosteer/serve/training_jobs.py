"""Train prompts in the background, one after the other, for classes that were added from a few images.

A class is trained against the classes that precede it in the model, as if it had been learned in order: what
`forget` guarantees later depends on this order. Classes that are added meanwhile stay as they are. If a class is
deleted meanwhile, its own training ends, and other trainings restart: no prompt may depend on a deleted class.
Images stay in memory until the training ends, never longer.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
from functools import partial

from torch import Tensor

from protosteer.errors import ProtosteerError
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.runtime.progress import Stage
from protosteer.serve.limits import RequestError, stopping_error
from protosteer.serve.model_store import OutdatedError, Store
from protosteer.serve.schemas import JobStatus

logger = logging.getLogger("protosteer.serve")

_MAX_ENDED = 100  # ended jobs whose status can still be read
_MESSAGES = {"keys": "embedding the images", "training": "training the prompt", "values": "making the prototypes"}


class Jobs:
    """Admit, run and report training jobs."""

    def __init__(self, store: Store, capacity: int):
        self._store = store
        self._capacity = capacity
        self._lock = threading.Lock()
        self._training = threading.Lock()  # held by the job that trains
        self._jobs: dict[str, JobStatus] = {}  # open jobs, and the last ones that ended
        self._stopping = False

    @property
    def open_count(self) -> int:
        """Return the number of jobs that wait or train."""
        return sum(not status.ended for status in list(self._jobs.values()))

    def get(self, id: str) -> JobStatus:
        """Return the status of a job; raise `RequestError` 404 if it is unknown."""
        if id not in self._jobs:
            raise RequestError(404, f"there is no job '{id}'; it is unknown, or ended long ago")
        return self._jobs[id]

    def admit(self, class_name: str) -> str:
        """Reserve a job before its images arrive, and return its id; then `start` or `drop` it."""
        with self._lock:
            if self._stopping:
                raise stopping_error()
            if self.open_count >= self._capacity:
                raise RequestError(503, f"{self.open_count} trainings are waiting; try again later", retry_after=30)
            for ended_id in [id for id, status in self._jobs.items() if status.ended][:-_MAX_ENDED]:
                del self._jobs[ended_id]
            id = secrets.token_hex(8)
            self._jobs[id] = JobStatus(
                id=id, class_=class_name, state="waiting", done=0, total=0, seconds_left=None, message=""
            )
            return id

    def drop(self, id: str) -> None:
        """Remove a job that was admitted and not started."""
        with self._lock:
            del self._jobs[id]

    def start(self, id: str, record: TaskRecord, pixels: Tensor) -> None:
        """Train a prompt for a class's images [n, 3, h, w] in the background."""
        arguments = (id, record, pixels)
        threading.Thread(target=self._run, args=arguments, name="train", daemon=True).start()

    def stop(self) -> None:
        """End the training at its next step. Return at once."""
        self._stopping = True

    def join(self, timeout: float) -> None:
        """Wait for the training in progress; no other starts."""
        self._training.acquire(timeout=timeout)

    def _update(self, id: str, **changes: object) -> None:
        """Replace the status as a whole, so that no thread reads half a change."""
        self._jobs[id] = self._jobs[id].model_copy(update=changes)

    def _run(self, id: str, record: TaskRecord, pixels: Tensor) -> None:
        with self._training:
            self._update(id, state="training")
            try:
                self._train(id, record, pixels)
            except ProtosteerError as error:
                self._update(id, state="failed", seconds_left=None, message=str(error))
            except Exception as error:
                logger.exception("training class %r failed", record.class_names[0])
                message = f"the training failed ({type(error).__name__}); the log of the service says more"
                self._update(id, state="failed", seconds_left=None, message=message)
            else:
                message, total = "the class has a prompt of its own now", self._jobs[id].total
                self._update(id, state="done", done=total, seconds_left=0.0, message=message)

    def _train(self, id: str, record: TaskRecord, pixels: Tensor) -> None:
        """Train until the result is stored; restart if a preceding class is deleted meanwhile."""
        original = self._store.current.learner
        labels = record.class_names * len(pixels)
        while True:
            predecessors = self._store.predecessors(record)
            if not predecessors:
                raise RequestError(422, "no class is left to train this one against")
            learner = Learner(original.backbone, original.settings)
            learner.memory = Memory(predecessors)
            try:
                on_stage = partial(self._on_stage, id, record, predecessors)
                trained_record = learner.learn((pixels, labels), record.name, on_stage)
                self._store.replace(record, _complete(trained_record, record), predecessors)
                return
            except OutdatedError:
                message = "restarting: a class was deleted, or a correction was undone"
                self._update(id, done=0, total=0, seconds_left=None, message=message)

    def _on_stage(self, id: str, record: TaskRecord, predecessors: tuple[TaskRecord, ...], stage: Stage) -> None:
        if self._stopping:
            raise RequestError(503, "the service is stopping; the class stays as it was added")
        self._store.check_predecessors(record, predecessors)
        self._update(id, message=_MESSAGES[stage.doing])
        if stage.training:
            self._update(id, done=stage.done, total=stage.total, seconds_left=stage.training.seconds_left)


def _complete(record: TaskRecord, added_record: TaskRecord) -> TaskRecord:
    """Complete a trained record by what was measured when the class was added: date, bytes, held-out similarities.

    The similarities were measured before the prompt was trained on all images.
    """
    classes = record.classes.with_rows("held_out", [added_record.classes.columns.get("held_out")])
    metadata = dataclasses.replace(
        record.metadata, learned=added_record.metadata.learned, image_bytes=added_record.metadata.image_bytes
    )
    return dataclasses.replace(record, classes=classes, metadata=metadata)
