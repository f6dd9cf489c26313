"""Progress of learning and of runs through a stream: live bars on a terminal, a few plain lines elsewhere.

Time left is told from time spent: of a stage by its share done, of runs by their tasks done.
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
    """Shows which stage of learning is under way, how far it is, and how long it still takes."""

    rows = 1  # the last one is the stage's

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self.console, self.clock = console, clock
        self.live = console.is_terminal and not console.is_dumb_terminal
        self.bars = _bars(console, self.live)
        self.ids = [self.bars.add_task("", total=1.0, note="", visible=False) for _ in range(self.rows)]
        self.doing, self.callbacks = "", clock()
        self.spoke = clock()

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def on_stage(self, stage: Stage) -> None:
        left = f"{duration(self._stage_left(stage))} left"
        share = stage.done / stage.total if stage.total else 1.0
        self._draw(-1, f"  {_stage_name(stage)}", share, f"{left}, {_numbers(stage)}")
        if _worth_a_line(stage) and self.clock() - self.spoke >= _QUIET_SECONDS:
            self._tell(f"{_stage_name(stage)}: {_numbers(stage)}, {left}")

    def _stage_left(self, stage: Stage) -> float:
        """Seconds, if the rest takes as long as what this process has done of it."""
        if stage.doing != self.doing:
            self.doing, self.began = stage.doing, self.callbacks
            # Steps before the first that is reported were made by an interrupted training.
            self.skipped = stage.training.step - 1 if stage.training else 0
        self.callbacks = self.clock()
        return (self.callbacks - self.began) / max(1, stage.done - self.skipped) * (stage.total - stage.done)

    def _tell(self, line: str) -> None:
        """A line for where there are no bars."""
        self.spoke = self.clock()
        if not self.live:
            self._print(f"  {line}")

    def _print(self, line: str, style: str | None = None) -> None:
        """Class names in it may look like markup."""
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _draw(self, row: int, name: str, share: float = 0.0, note: str = "") -> None:
        self.bars.update(self.ids[row], description=name, completed=share, note=note, visible=bool(name))


class RunProgress(LearnProgress):
    """Shows several runs of a stream (seeds or variants, by name), one after the other.

    log: is given every plain line, whether the console shows bars or not.
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
        self.run = self.task = 0  # under way, counted from 0
        self.seconds: list[float] = []  # of the tasks that were finished in this process

    def say(self, line: str, style: str | None = None) -> None:
        """A line that stays, above the bars."""
        self.spoke = self.clock()
        self._print(line, style)
        self.log(line)

    def begin(self, name: str, about: str, done_tasks: int = 0) -> None:
        """A run starts; `about` says in a few words what is special about it.

        done_tasks: restored from an interrupted run. They took no time now, and tell nothing of it.
        """
        self.run = self.runs.index(name)
        self.say(f"{name}: {about}", style="bold")
        self._begin_task(done_tasks)

    def on_task(self, i: int, run: Run) -> None:
        """Task i is learned and tested."""
        self.seconds.append(self.clock() - self.task_began)
        task = self.stream[i]
        line = f"  task {i + 1} of {len(self.stream)}: learned {listed(task.classes)}"
        line += (
            f" and {counted(sum(task.visitors.values()), 'image')} of other classes" if task.visiting else ""
        )
        line += f"; accuracy {metrics.average_accuracy(run.matrix, i):.1f} %"
        if i:
            line += f" over all tasks so far, {metrics.forgetting(run.matrix, i):.1f} points forgotten"
        self.say(line)
        self._begin_task(i + 1)

    def on_stage(self, stage: Stage) -> None:
        super().on_stage(stage)
        self._draw_runs()

    def time_left(self) -> float | None:
        """Seconds until all is done, if tasks take as long as those finished; None before the first is."""
        if not self.seconds:
            return None
        mean = sum(self.seconds) / len(self.seconds)
        tasks = (len(self.runs) - self.run) * len(self.stream) - self.task
        return max(0.0, mean * tasks - min(mean, self.clock() - self.task_began))

    def _begin_task(self, number: int) -> None:
        self.task = number
        self.doing, self.callbacks = "", self.clock()
        self.task_began = self.callbacks
        self._draw(-1, "")
        self._draw_runs()

    def _draw_runs(self) -> None:
        runs, tasks, left = len(self.runs), len(self.stream), self.time_left()
        run = f"{self.run + 1} of {runs}: {self.runs[self.run]}" if runs > 1 else self.runs[self.run]
        share = (self.run * tasks + self.task) / (runs * tasks)
        self._draw(0, run, share, "" if left is None else f"{duration(left)} left")
        self._draw(1, f" task {min(self.task + 1, tasks)} of {tasks}", self.task / tasks)

    def _tell(self, line: str) -> None:
        left = self.time_left()
        line = f"task {self.task + 1} of {len(self.stream)}, {line}"
        line += "" if left is None else f"; {duration(left)} left in all"
        super()._tell(line)
        self.log(f"  {line}")


class SweepProgress(LearnProgress):
    """Shows runs of a stream that go on elsewhere, several at once: one bar over all of their tasks."""

    def __init__(self, console: Console, log: Callable[[str], None] = lambda line: None):
        super().__init__(console)
        self.log = log

    def say(self, line: str) -> None:
        self._print(line)
        self.log(line)


def _bars(console: Console, live: bool) -> Progress:
    name = Column(no_wrap=True, overflow="ellipsis", min_width=26, max_width=28)
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=name),
        BarColumn(bar_width=16),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn(
            "{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        ),
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
    """Of training only the end of an epoch, so that its loss is a whole epoch's."""
    training = stage.training
    return not training or training.step * training.epochs % training.steps == 0
