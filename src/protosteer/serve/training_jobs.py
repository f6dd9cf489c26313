"""Prompts trained in the background, one after the other, for classes that were added from a few images.

A class is trained as if it had been learned in its turn: against the classes that stand before it in the
model, in its own place. What a later forgetting promises rests on this order. Classes that are added
meanwhile stay as they are; a class that is deleted meanwhile ends its own training, and begins that of others
anew: what deleting promised must not be broken by a prompt that still knew the class. Images are kept in
memory until the training has ended, never longer.
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
from protosteer.serve.limits import Refused, stopping
from protosteer.serve.model_store import Outdated, Store
from protosteer.serve.schemas import JobStatus

logger = logging.getLogger("protosteer.serve")

_REMEMBERED = 100  # ended jobs that can still be asked for
_DOING = {
    "keys": "embedding the images",
    "training": "training the prompt",
    "values": "making the prototypes",
}


class Jobs:
    def __init__(self, store: Store, most: int):
        self._store = store
        self._most = most
        self._lock = threading.Lock()
        self._training = threading.Lock()  # held by the job whose turn it is
        self._jobs: dict[str, JobStatus] = {}  # those open, and the last ones that ended
        self._stopping = False

    @property
    def open(self) -> int:
        return sum(not status.ended for status in list(self._jobs.values()))

    def get(self, id: str) -> JobStatus:
        if id not in self._jobs:
            raise Refused(404, f"there is no job '{id}'; it is unknown, or ended long ago")
        return self._jobs[id]

    def admit(self, class_name: str) -> str:
        """A place for a job, before its images are there; `start` or `drop` it."""
        with self._lock:
            if self._stopping:
                raise stopping()
            if self.open >= self._most:
                raise Refused(503, f"{self.open} trainings are waiting; try again later", retry_after=30)
            for old in [id for id, status in self._jobs.items() if status.ended][:-_REMEMBERED]:
                del self._jobs[old]
            id = secrets.token_hex(8)
            self._jobs[id] = JobStatus(
                id=id, class_=class_name, state="waiting", done=0, total=0, seconds_left=None, message=""
            )
            return id

    def drop(self, id: str) -> None:
        with self._lock:
            del self._jobs[id]

    def start(self, id: str, record: TaskRecord, pixels: Tensor) -> None:
        arguments = (id, record, pixels)
        threading.Thread(target=self._carry_out, args=arguments, name="train", daemon=True).start()

    def stop(self) -> None:
        """End at the next step of the training. Returns at once."""
        self._stopping = True

    def join(self, timeout: float) -> None:
        """Wait for the training that is under way; no other will begin."""
        self._training.acquire(timeout=timeout)

    def _tell(self, id: str, **changes: object) -> None:
        """Replaced as a whole, so that another thread never sees half a change."""
        self._jobs[id] = self._jobs[id].model_copy(update=changes)

    def _carry_out(self, id: str, record: TaskRecord, pixels: Tensor) -> None:
        with self._training:
            self._tell(id, state="training")
            try:
                self._train(id, record, pixels)
            except ProtosteerError as error:
                self._tell(id, state="failed", seconds_left=None, message=str(error))
            except Exception as error:
                logger.exception("training class %r failed", record.class_names[0])
                message = f"the training failed ({type(error).__name__}); the log of the service says more"
                self._tell(id, state="failed", seconds_left=None, message=message)
            else:
                message, total = "the class has a prompt of its own now", self._jobs[id].total
                self._tell(id, state="done", done=total, seconds_left=0.0, message=message)

    def _train(self, id: str, record: TaskRecord, pixels: Tensor) -> None:
        """Train until the result may be stored; begin again when a class it is set apart from is deleted."""
        served = self._store.current.learner
        labels = record.class_names * len(pixels)
        while True:
            before = self._store.before(record)
            if not before:
                raise Refused(422, "no class is left that this one could be set apart from")
            learner = Learner(served.backbone, served.settings)
            learner.memory = Memory(before)
            try:
                on_stage = partial(self._on_stage, id, record, before)
                trained = learner.learn((pixels, labels), record.name, on_stage)
                self._store.replace(record, _completed(trained, record), before)
                return
            except Outdated:
                again = "beginning again: a class was deleted, or a correction taken back"
                self._tell(id, done=0, total=0, seconds_left=None, message=again)

    def _on_stage(self, id: str, record: TaskRecord, before: tuple[TaskRecord, ...], stage: Stage) -> None:
        if self._stopping:
            raise Refused(503, "the service is stopping; the class stays as it was added")
        self._store.check_before(record, before)
        self._tell(id, message=_DOING[stage.doing])
        if stage.training:
            self._tell(id, done=stage.done, total=stage.total, seconds_left=stage.training.seconds_left)


def _completed(trained: TaskRecord, added: TaskRecord) -> TaskRecord:
    """With what is known from when the class was added.

    How similar unseen images are was measured then, before the prompt was trained on all that there are.
    """
    classes = trained.classes.with_rows("held_out", [added.classes.columns.get("held_out")])
    about = dataclasses.replace(
        trained.metadata, learned=added.metadata.learned, image_bytes=added.metadata.image_bytes
    )
    return dataclasses.replace(trained, classes=classes, metadata=about)
