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
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from protosteer.errors import ProtosteerError, ProtosteerWarning
from protosteer.learner import Learner
from protosteer.method.memory import Memory, TaskRecord
from protosteer.running.progress import Stage
from protosteer.serve.limits import Refused, stopping
from protosteer.serve.store import Outdated, Store

logger = logging.getLogger("protosteer.serve")

_REMEMBERED = 100  # ended jobs that can still be asked for
_DOING = {
    "keys": "embedding the images",
    "training": "training the prompt",
    "values": "making the prototypes",
}


@dataclass(frozen=True)
class Status:
    """What a client is told. `done` and `total` count steps of training; `total` is 0 until it is known."""

    id: str
    class_name: str
    state: str = "waiting"  # then "training", then "done" or "failed"
    done: int = 0
    total: int = 0
    seconds_left: float | None = None
    message: str = ""


@dataclass(eq=False)
class Job:
    status: Status
    record: TaskRecord | None = None
    pixels: Tensor | None = None

    def tell(self, **changes: object) -> None:
        """Replaced as a whole, so that another thread never sees half a change."""
        self.status = dataclasses.replace(self.status, **changes)  # type: ignore[arg-type]


class Jobs:
    def __init__(self, store: Store, most: int):
        self._store = store
        self._most = most
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}  # those open, and the last ones that ended
        self._waiting: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def open(self) -> int:
        return sum(job.status.state in ("waiting", "training") for job in list(self._jobs.values()))

    def get(self, id: str) -> Status:
        job = self._jobs.get(id)
        if job is None:
            raise Refused(404, f"there is no job '{id}'; it is unknown, or ended long ago")
        return job.status

    def admit(self, class_name: str) -> Job:
        """A place for a job, before its images are there; `start` or `drop` it."""
        with self._changed:
            if self._stopping:
                raise stopping()
            if self.open >= self._most:
                raise Refused(503, f"{self.open} trainings are waiting; try again later", retry_after=30)
            job = Job(Status(secrets.token_hex(8), class_name))
            self._jobs[job.status.id] = job
            return job

    def drop(self, job: Job) -> None:
        with self._changed:
            self._jobs.pop(job.status.id, None)

    def start(self, job: Job, record: TaskRecord, pixels: Tensor) -> None:
        with self._changed:
            job.record, job.pixels = record, pixels
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="train", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """End at the next step of the training. Returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                job = self._waiting.popleft()
            self._carry_out(job)
            job.record = job.pixels = None
            with self._changed:
                ended = [id for id, job in self._jobs.items() if job.status.state in ("done", "failed")]
                for id in ended[:-_REMEMBERED]:
                    del self._jobs[id]

    def _carry_out(self, job: Job) -> None:
        job.tell(state="training")
        try:
            with _caught_warnings(self._store.lock) as caught:
                self._train(job)
        except (ProtosteerError, Refused) as error:
            job.tell(state="failed", seconds_left=None, message=str(error))
        except Exception as error:
            logger.exception("training class %r failed", job.status.class_name)
            message = f"the training failed ({type(error).__name__}); the log of the service says more"
            job.tell(state="failed", seconds_left=None, message=message)
        else:
            message = "; ".join(["the class has a prompt of its own now", *caught])
            job.tell(state="done", done=job.status.total, seconds_left=0.0, message=message)

    def _train(self, job: Job) -> None:
        """Train until the result may be stored; begin again when a class it is set apart from is deleted."""
        record, pixels = job.record, job.pixels
        assert record is not None and pixels is not None
        served = self._store.current.learner
        name = record.class_names[0]
        while True:
            before = self._store.before(record)
            if not before:
                raise Refused(422, "no class is left that this one could be set apart from")
            learner = Learner(served.backbone, served.settings)
            learner.memory = Memory(before)
            try:
                trained = learner.learn(
                    (pixels, [name] * len(pixels)), record.name, partial(self._on_stage, job, record, before)
                )
                self._store.replace(record, _completed(trained, record), before)
                return
            except Outdated:
                job.tell(done=0, total=0, seconds_left=None, message="beginning again: a class was deleted")

    def _on_stage(self, job: Job, record: TaskRecord, before: tuple[TaskRecord, ...], stage: Stage) -> None:
        if self._stopping:
            raise Refused(503, "the service is stopping; the class stays as it was added")
        self._store.check_before(record, before)
        if stage.training is None:
            job.tell(message=_DOING.get(stage.doing, stage.doing))
        else:
            left = stage.training.seconds_left
            job.tell(done=stage.done, total=stage.total, seconds_left=left, message=_DOING["training"])


def _completed(trained: TaskRecord, added: TaskRecord) -> TaskRecord:
    """With what is known from when the class was added.

    How similar unseen images are was measured then, before the prompt was trained on all that there are.
    """
    (one,), (before,) = trained.classes, added.classes
    classes = (dataclasses.replace(one, similarities=before.similarities),)
    about = dataclasses.replace(
        trained.about, learned=added.about.learned, image_bytes=added.about.image_bytes
    )
    return dataclasses.replace(trained, classes=classes, about=about)


@contextmanager
def _caught_warnings(lock: threading.Lock) -> Iterator[list[str]]:
    """Our own warnings as lines; others go their way.

    Where warnings go is one setting of the whole process. Whoever else changes it for a while (clustering,
    when a class is added) holds the lock, so that what is set back here at the end is what was there at the
    beginning.
    """
    messages: list[str] = []
    catching = warnings.catch_warnings(record=True)
    with lock:
        caught = catching.__enter__()
        warnings.simplefilter("always", ProtosteerWarning)
    try:
        yield messages
    finally:
        with lock:
            catching.__exit__(None, None, None)
        for warning in caught or []:
            if not issubclass(warning.category, ProtosteerWarning):
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
        messages += [str(w.message) for w in caught or [] if issubclass(w.category, ProtosteerWarning)]
