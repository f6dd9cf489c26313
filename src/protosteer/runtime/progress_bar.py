"""Show the progress of learning: live bars in a terminal or notebook, a few plain lines elsewhere.

The time left of a stage is estimated from the time spent and the share done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from protosteer.runtime.progress import Stage

if TYPE_CHECKING:
    from typing_extensions import Self

_QUIET_SECONDS = 30.0  # between two plain lines about the same task
STAGE_NAMES = {
    "keys": "looking at the images",
    "values": "storing the classes",
    "calibrating": "measuring similarities",
    "checking": "checking the result",
}


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
        remaining_text = f"{duration(self._stage_left(stage))} left"
        share = stage.done / stage.total if stage.total else 1.0
        name, numbers = self._words(stage)
        self._draw(-1, f"  {name}", share, ", ".join(filter(None, [remaining_text, numbers])))
        if _worth_a_line(stage) and self.clock() - self.last_line >= _QUIET_SECONDS:
            self._report(f"{name}: {', '.join(filter(None, [numbers, remaining_text]))}")

    def _words(self, stage: Stage) -> tuple[str, str]:
        """Return the name of a stage and its progress as plain words."""
        training = stage.training
        if training:
            return f"training, round {training.epoch} of {training.epochs}", ""
        return STAGE_NAMES.get(stage.doing, stage.doing), f"{stage.done:,} of {stage.total:,}"

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


def _worth_a_line(stage: Stage) -> bool:
    """Return True at the end of an epoch, whose loss is complete, and in stages other than training."""
    training = stage.training
    return not training or training.step * training.epochs % training.steps == 0
