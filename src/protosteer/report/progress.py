"""Show the progress of benchmark runs: live bars on a terminal, a few plain lines elsewhere.

The time left of runs is estimated by their tasks done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console

from protosteer.evaluation import metrics
from protosteer.evaluation.protocol import Run
from protosteer.runtime.progress import Stage
from protosteer.runtime.progress_bar import LearnProgress, duration
from protosteer.streams.base import Stream
from protosteer.util.text import counted, listed


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

    def _words(self, stage: Stage) -> tuple[str, str]:
        """Describe a stage and its progress in the terms of a benchmark."""
        training = stage.training
        if not training:
            return stage.doing, f"{stage.done:,} of {stage.total:,}"
        accuracy = "" if training.accuracy is None else f", {training.accuracy:.1f} % right"
        numbers = f"loss {training.loss:.2f}{accuracy}, {training.images_per_second:,.0f} images/s"
        return f"{stage.doing}, epoch {training.epoch} of {training.epochs}", numbers

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
        runs, tasks, seconds = len(self.runs), len(self.stream), self.time_left()
        run = f"{self.run + 1} of {runs}: {self.runs[self.run]}" if runs > 1 else self.runs[self.run]
        share = (self.run * tasks + self.task) / (runs * tasks)
        self._draw(0, run, share, "" if seconds is None else f"{duration(seconds)} left")
        self._draw(1, f" task {min(self.task + 1, tasks)} of {tasks}", self.task / tasks)

    def _report(self, line: str) -> None:
        seconds = self.time_left()
        line = f"task {self.task + 1} of {len(self.stream)}, {line}"
        line += "" if seconds is None else f"; {duration(seconds)} left in all"
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
