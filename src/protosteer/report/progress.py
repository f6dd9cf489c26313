"""Progress of runs through a stream: a live bar on a terminal, one plain line per task anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from protosteer.evaluation import metrics
from protosteer.evaluation.protocol import Run
from protosteer.learner import Stage
from protosteer.settings import Settings
from protosteer.streams.base import Stream, Task

# A training step costs about as much per image as so many plain forward passes.
_TRAINING_COST = 4.0
_ORDER = ("keys", "training", "values", "testing")


class RunProgress:
    """Shows several runs of a stream, by name, as one piece of work whose end can be foreseen."""

    def __init__(self, console: Console, stream: Stream, runs: Mapping[str, Settings]):
        self.stream = stream
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.work = {name: [_work(settings, task) for task in stream] for name, settings in runs.items()}
        total = sum(sum(stages.values()) for tasks in self.work.values() for stages in tasks)
        self.row = self.bar.add_task("", total=total, note="")
        self.done = 0.0
        self.name = ""
        self.tasks: list[dict[str, float]] = []
        self.number = 0

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, line: str, style: str | None = None) -> None:
        """A line that stays, above the bar; class names in it may look like markup."""
        self.bar.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def begin(self, name: str, about: str) -> None:
        """A run starts: `about` says in a few words what is special about it."""
        self.name, self.tasks, self.number = name, self.work[name], 0
        self.say(f"{name}: {about}", style="bold")

    def on_stage(self, stage: Stage) -> None:
        work = self.tasks[self.number]
        before = sum(work[earlier] for earlier in _ORDER[: _ORDER.index(stage.doing)])
        note = ""
        if stage.training:
            note = f"loss {stage.training.loss:.2f}"
            if stage.training.accuracy is not None:
                note += f", {stage.training.accuracy:.1f} % right"
        self.bar.update(
            self.row,
            completed=self.done + before + work[stage.doing] * stage.done / stage.total,
            description=f"{self.name}, task {self.number + 1} of {len(self.stream)}, {stage.doing}",
            note=note,
        )

    def on_task(self, i: int, run: Run) -> None:
        classes = ", ".join(self.stream[i].classes)
        line = f"  task {i + 1} of {len(self.stream)}: learned {classes}; "
        line += f"accuracy {metrics.average_accuracy(run.matrix, i):.1f} %"
        if i:
            line += f" over all tasks so far, {metrics.forgetting(run.matrix, i):.1f} points forgotten"
        self.say(line)
        self.done += sum(self.tasks[i].values())
        self.number = i + 1
        self.bar.update(self.row, completed=self.done)


def _work(settings: Settings, task: Task) -> dict[str, float]:
    """How much each stage of learning and testing a task costs, in forward passes of one image."""
    images, trained = len(task.train), settings.prompts
    batch = min(settings.batch_size, images)
    steps = settings.epochs * max(1, images // settings.batch_size)
    return {
        "keys": images,
        "training": _TRAINING_COST * steps * batch if trained else 0.0,
        "values": images if trained else 0.0,
        "testing": len(task.test) * (1 + trained),
    }
