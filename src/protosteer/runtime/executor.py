"""Run independent jobs: in this process, one after the other, or on remote workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Job:
    """One piece of work. It may be done twice: a worker may die when it has nearly finished."""

    name: str  # for messages, such as "seed 1"
    arguments: tuple[Any, ...]


Work = Callable[..., Any]  # does a job, given its arguments
MakeWork = Callable[[], Work]  # loads what all jobs need, once in every process; is pickled
OnDone = Callable[[Job, Any], None]  # gets a job and its result, in the order in which jobs are done


class Executor(Protocol):
    """Runs jobs. After an error or Ctrl-C, results that `on_done` got stay valid."""

    @property
    def is_remote(self) -> bool:
        """True if jobs run in other processes."""

    def run(
        self, make: MakeWork, jobs: Sequence[Job], on_done: OnDone, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Do all jobs.

        Args:
            make: Makes the function that does a job.
            jobs: The jobs.
            on_done: Gets every job with its result.
            on_wait: Is called about every second while workers work.
        """


class LocalExecutor:
    """Runs jobs in this process, one after the other."""

    is_remote = False

    def run(
        self, make: MakeWork, jobs: Sequence[Job], on_done: OnDone, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Do all jobs; see `Executor.run`."""
        if not jobs:
            return
        work = make()
        for job in jobs:
            on_done(job, work(*job.arguments))
