"""Progress of learning and of runs through a stream: live bars on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.progress import Task as Row
from rich.table import Column
from rich.text import Text

from protosteer.evaluation import metrics
from protosteer.evaluation.metrics import Matrix
from protosteer.running.progress import Stage
from protosteer.streams.base import Stream, Task

if TYPE_CHECKING:
    from typing_extensions import Self

Costs = Callable[[Task], Mapping[str, float]]  # of every stage of a task, in order; the unit does not matter

_QUIET_SECONDS = 30.0  # between two plain lines about the same task
_MOST_CLASSES = 10  # named in a line


class Result(Protocol):
    """What a run has measured so far."""

    @property
    def matrix(self) -> Matrix: ...


class _Progress:
    """Bars, and how much of the foreseen work is done."""

    def __init__(self, console: Console, total: float, rows: int, clock: Callable[[], float]):
        self.console, self.clock = console, clock
        self.live = console.is_terminal and not console.is_dumb_terminal
        self.estimate = Estimate(total)
        self.reached = 0.0  # cost of what is done of the task under way
        self.doing = ""
        self.spoke = clock()
        self.bars = _bars(console, self.live, self.time_left)
        self.rows = [self.bars.add_task("", total=1.0, note="", first=i == 0) for i in range(rows)]

    def __enter__(self) -> Self:
        self.estimate.start(self.clock())
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def time_left(self) -> float | None:
        """Seconds until all is done; None while nothing is known."""
        return self.estimate.left(self.clock())

    def _account(self, stage: Stage, work: Mapping[str, float]) -> float:
        """The share of the stage that is done; a stage that no cost was given for counts for nothing."""
        share = stage.done / stage.total if stage.total else 1.0
        if stage.doing in work:
            before = sum(list(work.values())[: list(work).index(stage.doing)])
            if stage.doing != self.doing:
                # What lies between the last report and the first of a stage was done by an interrupted run.
                skipped = (stage.training.step - 1) / stage.training.steps if stage.training else 0.0
                self._reach(before + work[stage.doing] * skipped, restored=True)
            self._reach(before + work[stage.doing] * share)
        self.doing = stage.doing
        self.estimate.look(self.clock())
        return share

    def _reach(self, cost: float, restored: bool = False) -> None:
        step = max(0.0, cost - self.reached)
        self.reached += step
        (self.estimate.restored if restored else self.estimate.worked)(step)

    def _line(self, stage: Stage) -> str:
        left = self.time_left()
        parts = [_numbers(stage), f"{duration(left)} left" if left is not None else ""]
        return f"{_stage_name(stage)}: " + ", ".join(part for part in parts if part)

    def _time_to_speak(self, stage: Stage) -> bool:
        return _worth_a_line(stage) and self.clock() - self.spoke >= _QUIET_SECONDS


class RunProgress(_Progress):
    """Shows several runs of a stream (seeds or variants, by name) as one piece of work whose end can be foreseen.

    runs: what each costs. log: hears every plain line, whether the console shows bars or not.
    """

    def __init__(
        self,
        console: Console,
        stream: Stream,
        runs: Mapping[str, Costs],
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.work = {name: [dict(costs(task)) for task in stream] for name, costs in runs.items()}
        super().__init__(console, sum(map(_total, self.work.values())), 3, clock)
        self.stream, self.log = stream, log
        self.name = ""
        self.number = 0  # of the task under way, from 0

    def say(self, line: str, style: str | None = None) -> None:
        """A line that stays, above the bars; class names in it may look like markup."""
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
        self._note_down(line)

    def begin(self, name: str, about: str, done_tasks: int = 0) -> None:
        """A run starts; `about` says in a few words what is special about it.

        done_tasks: restored from an interrupted run. They took no time now, so they foretell none.
        """
        self.name, self.number, self.reached, self.doing = name, done_tasks, 0.0, ""
        self.estimate.restored(_total(self.work[name][:done_tasks]))
        self.estimate.look(self.clock())
        self.say(f"{name}: {about}", style="bold")
        self._draw("", 0.0, "")

    def on_stage(self, stage: Stage) -> None:
        """Something is under way. A stage that no cost was given for is shown, but counts for nothing."""
        work = self.work[self.name][self.number] if self.number < len(self.stream) else {}
        share = self._account(stage, work)
        self._draw(_stage_name(stage), share, _numbers(stage))
        if self._time_to_speak(stage):
            self._tell(stage)

    def on_task(self, i: int, result: Result) -> None:
        """Task i is learned and tested."""
        if self.number == i:
            self._reach(_total([self.work[self.name][i]]))
        self.number, self.reached, self.doing = i + 1, 0.0, ""
        self.estimate.look(self.clock())
        line = f"  task {i + 1} of {len(self.stream)}: learned {_names(self.stream[i].classes)}; "
        line += f"accuracy {metrics.average_accuracy(result.matrix, i):.1f} %"
        if i:
            line += f" over all tasks so far, {metrics.forgetting(result.matrix, i):.1f} points forgotten"
        self.say(line)
        self._draw("", 0.0, "")

    def _draw(self, stage: str, share: float, note: str) -> None:
        runs, tasks = list(self.work), self.work[self.name]
        run = f"{runs.index(self.name) + 1} of {len(runs)}: {self.name}" if len(runs) > 1 else self.name
        done = _total(tasks[: self.number]) + self.reached
        task = f" task {min(self.number + 1, len(tasks))} of {len(tasks)}"
        contents = (
            (run, self.estimate.share, ""),
            (task, done / (_total(tasks) or 1.0), ""),
            (f"  {stage}", share, note),
        )
        for row, (description, completed, text) in zip(self.rows, contents, strict=True):
            self.bars.update(
                row,
                description=description,
                completed=completed,
                note=text,
                visible=bool(description.strip()),
            )

    def _tell(self, stage: Stage) -> None:
        line = f"  task {self.number + 1} of {len(self.stream)}, {self._line(stage)}"
        if not self.live:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._note_down(line)

    def _note_down(self, line: str) -> None:
        self.spoke = self.clock()
        if self.log:
            self.log(line)


class LearnProgress(_Progress):
    """Shows how far the learning of one task is; `costs` are those of its stages, in order."""

    def __init__(
        self, console: Console, costs: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ):
        super().__init__(console, sum(costs.values()), 2, clock)
        self.costs = dict(costs)
        self.bars.update(self.rows[0], description="getting ready")
        self.bars.update(self.rows[1], visible=False)

    def on_stage(self, stage: Stage) -> None:
        share = self._account(stage, self.costs)
        self.bars.update(self.rows[0], description=f"learning {stage.task}", completed=self.estimate.share)
        self.bars.update(
            self.rows[1],
            description=f" {_stage_name(stage)}",
            completed=share,
            note=_numbers(stage),
            visible=True,
        )
        if not self.live and self._time_to_speak(stage):
            self.console.print(f"  {self._line(stage)}", markup=False, highlight=False, soft_wrap=True)
            self.spoke = self.clock()


class Estimate:
    """When work will be done, from the seconds that a unit of it has taken so far."""

    def __init__(self, total: float):
        self.total = total
        self.done = 0.0  # restored work included
        self.measured = 0.0  # work that was done since the start
        self.began = self.seen = 0.0

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0

    def start(self, now: float) -> None:
        self.began = self.seen = now

    def restored(self, cost: float) -> None:
        self.done += cost

    def worked(self, cost: float) -> None:
        self.done += cost
        self.measured += cost

    def look(self, now: float) -> None:
        """The work that is known now was done by now."""
        self.seen = now

    def left(self, now: float) -> float | None:
        """Counts down between reports."""
        if not self.measured:
            return None
        rate = (self.seen - self.began) / self.measured
        return max(0.0, rate * (self.total - self.done) - (now - self.seen))


class _TimeLeft(ProgressColumn):
    """On the first row, time left; on the others, their note."""

    max_refresh = 0.5

    def __init__(self, time_left: Callable[[], float | None]):
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self.time_left = time_left

    def render(self, row: Row) -> Text:
        if not row.fields["first"]:
            return Text(row.fields["note"])
        left = self.time_left()
        return Text("" if left is None else f"{duration(left)} left")


def _bars(console: Console, live: bool, time_left: Callable[[], float | None]) -> Progress:
    return Progress(
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", min_width=26, max_width=28),
        ),
        BarColumn(bar_width=16),
        TextColumn("{task.percentage:>3.0f}%"),
        _TimeLeft(time_left),
        console=console,
        transient=True,
        disable=not live,
    )


def duration(seconds: float) -> str:
    """As exact as a person wants to know it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _stage_name(stage: Stage) -> str:
    training = stage.training
    return f"{stage.doing}, epoch {training.epoch} of {training.epochs}" if training else stage.doing


def _numbers(stage: Stage) -> str:
    training = stage.training
    if not training:
        return f"{stage.done:,} of {stage.total:,}"
    right = "" if training.accuracy is None else f", {training.accuracy:.1f} % right"
    return f"loss {training.loss:.2f}{right}, {training.images_per_second:,.0f} images/s"


def _worth_a_line(stage: Stage) -> bool:
    """Training speaks when an epoch is over, so that its loss is a whole epoch's."""
    training = stage.training
    return not training or training.step * training.epochs % training.steps == 0


def _names(classes: list[str]) -> str:
    if len(classes) <= _MOST_CLASSES:
        return ", ".join(classes)
    return f"{', '.join(classes[: _MOST_CLASSES - 2])} and {len(classes) - _MOST_CLASSES + 2} more"


def _total(tasks: list[dict[str, float]]) -> float:
    return sum(sum(stages.values()) for stages in tasks)
