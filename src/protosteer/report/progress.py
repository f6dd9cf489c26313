"""Show the progress of learning and of benchmark runs: live bars on a terminal, a few plain lines elsewhere.

The time left is estimated from the time spent: of a stage by its share done, of runs by their tasks done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from protosteer.evaluation import metrics
from protosteer.evaluation.protocol import Run
from protosteer.runtime.progress import Stage
from protosteer.streams.base import Stream
from protosteer.util.text import counted, listed

if TYPE_CHECKING:
    from typing_extensions import Self

_QUIET_SECONDS = 30.0  # between two plain lines about the same task


class LearnProgress:
    """Show the stage of learning, its progress and the time left."""

    rows = 1  # the last one is the stage's

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self.console, self.clock = console, clock
        self.live = console.is_terminal and not console.is_dumb_terminal
        self.bars = _bars(console, self.live)
        self.ids = [self.bars.add_task("", total=1.0, note="", visible=False) for _ in range(self.rows)]
        self.doing, self.last_report, self.last_line = "", clock(), clock()

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def on_stage(self, stage: Stage) -> None:
        """Update the bar, or print a line if the last one is old."""
        left = f"{duration(self._stage_left(stage))} left"
        share = stage.done / stage.total if stage.total else 1.0
        self._draw(-1, f"  {_stage_name(stage)}", share, f"{left}, {_numbers(stage)}")
        if _worth_a_line(stage) and self.clock() - self.last_line >= _QUIET_SECONDS:
            self._report(f"{_stage_name(stage)}: {_numbers(stage)}, {left}")

    def _stage_left(self, stage: Stage) -> float:
        """Estimate the seconds left from what this process has done of the stage."""
        if stage.doing != self.doing:
            self.doing, self.began = stage.doing, self.last_report
            # An interrupted training made the steps before the first reported one.
            self.skipped = stage.training.step - 1 if stage.training else 0
        self.last_report = self.clock()
        return (self.last_report - self.began) / max(1, stage.done - self.skipped) * (stage.total - stage.done)

    def _report(self, line: str) -> None:
        """Print a line if there are no bars."""
        self.last_line = self.clock()
        if not self.live:
            self._print(f"  {line}")

    def _print(self, line: str, style: str | None = None) -> None:
        """Print without parsing class names as markup."""
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _draw(self, row: int, name: str, share: float = 0.0, note: str = "") -> None:
        self.bars.update(self.ids[row], description=name, completed=share, note=note, visible=bool(name))


class RunProgress(LearnProgress):
    """Show several runs of a benchmark (seeds or variants, by name), one after the other.

    `log` is called with every plain line, also if the console shows bars.
    """

    rows = 3

    def __init__(
        self,
        console: Console,
        stream: Stream,
        runs: Sequence[str],
        log: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(console, clock)
        self.stream, self.runs, self.log = stream, list(runs), log
        self.run = self.task = 0  # in progress, counted from 0
        self.seconds: list[float] = []  # of the tasks that this process has finished

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line that stays, above the bars."""
        self.last_line = self.clock()
        self._print(line, style)
        self.log(line)

    def begin(self, name: str, about: str, done_tasks: int = 0) -> None:
        """Start a run; the estimate ignores `done_tasks`, restored from an interrupted run."""
        self.run = self.runs.index(name)
        self.say(f"{name}: {about}", style="bold")
        self._begin_task(done_tasks)

    def on_task(self, i: int, run: Run) -> None:
        """Report that task i was learned and tested."""
        self.seconds.append(self.clock() - self.task_began)
        task = self.stream[i]
        line = f"  task {i + 1} of {len(self.stream)}: learned {listed(task.classes)}"
        line += f" and {counted(sum(task.visitors.values()), 'image')} of other classes" if task.visiting else ""
        line += f"; accuracy {metrics.average_accuracy(run.matrix, i):.1f} %"
        if i:
            line += f" over all tasks so far, {metrics.forgetting(run.matrix, i):.1f} points forgotten"
        self.say(line)
        self._begin_task(i + 1)

    def on_stage(self, stage: Stage) -> None:
        """Update all bars."""
        super().on_stage(stage)
        self._draw_runs()

    def time_left(self) -> float | None:
        """Estimate the seconds left from finished tasks; None before the first."""
        if not self.seconds:
            return None
        mean = sum(self.seconds) / len(self.seconds)
        tasks = (len(self.runs) - self.run) * len(self.stream) - self.task
        return max(0.0, mean * tasks - min(mean, self.clock() - self.task_began))

    def _begin_task(self, number: int) -> None:
        self.task = number
        self.doing, self.last_report = "", self.clock()
        self.task_began = self.last_report
        self._draw(-1, "")
        self._draw_runs()

    def _draw_runs(self) -> None:
        runs, tasks, left = len(self.runs), len(self.stream), self.time_left()
        run = f"{self.run + 1} of {runs}: {self.runs[self.run]}" if runs > 1 else self.runs[self.run]
        share = (self.run * tasks + self.task) / (runs * tasks)
        self._draw(0, run, share, "" if left is None else f"{duration(left)} left")
        self._draw(1, f" task {min(self.task + 1, tasks)} of {tasks}", self.task / tasks)

    def _report(self, line: str) -> None:
        left = self.time_left()
        line = f"task {self.task + 1} of {len(self.stream)}, {line}"
        line += "" if left is None else f"; {duration(left)} left in all"
        super()._report(line)
        self.log(f"  {line}")


class SweepProgress(LearnProgress):
    """Show runs of a benchmark in other processes: one bar over all of their tasks."""

    def __init__(self, console: Console, log: Callable[[str], None] = lambda line: None):
        super().__init__(console)
        self.log = log

    def say(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        self._print(line)
        self.log(line)


def _bars(console: Console, live: bool) -> Progress:
    name = Column(no_wrap=True, overflow="ellipsis", min_width=26, max_width=28)
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=name),
        BarColumn(bar_width=16),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
        transient=True,
        disable=not live,
    )


def duration(seconds: float) -> str:
    """Format seconds as s, min or h, as precisely as a person needs it."""
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
    """Return True at the end of an epoch, whose loss is complete, and in stages other than training."""
    training = stage.training
    return not training or training.step * training.epochs % training.steps == 0
