"""Who does jobs that need nothing of one another: this process, one after the other, or workers elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Job:
    """One piece of work. It must be fit to be done twice: a worker may die when it has nearly finished."""

    name: str  # what messages call it, such as "seed 1"
    arguments: tuple[Any, ...]


Work = Callable[..., Any]  # does a job, given its arguments
MakeWork = Callable[[], Work]  # loads what all jobs need, once in every process; must be fit to be sent there
OnDone = Callable[[Job, Any], None]  # is given a job and its result, in the order in which jobs are done


class Executor(Protocol):
    """What is done is done: an error or Ctrl-C takes nothing back that `on_done` was given."""

    @property
    def elsewhere(self) -> bool:
        """Whether work is made in other processes, which have nothing that this one has loaded."""

    def run(
        self,
        make: MakeWork,
        jobs: Sequence[Job],
        on_done: OnDone,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Do all jobs. on_wait: is called about every second while others work."""


class Local:
    """This process, one job after the other."""

    elsewhere = False

    def run(
        self,
        make: MakeWork,
        jobs: Sequence[Job],
        on_done: OnDone,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        if not jobs:
            return
        work = make()
        for job in jobs:
            on_done(job, work(*job.arguments))
