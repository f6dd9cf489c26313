"""Progress of runs and of learning: what a terminal, a pipe and a log file see, and how much time is left."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from conftest import easy_task
from protosteer.data.images import ArrayImages
from protosteer.report.progress import RunProgress
from protosteer.runtime.progress import Progress, Stage
from protosteer.runtime.progress_bar import LearnProgress, duration
from protosteer.streams.base import Stream, Task

MATRIX = [[97.0], [90.0, 92.0]]


def small_stream() -> Stream:
    tasks = []
    for i in range(2):
        names = [f"[b]c{i}{k}" for k in range(2)]
        images, labels = easy_task(names, per_class=1)
        tasks.append(Task(f"task-{i}", names, ArrayImages(images), labels, ArrayImages(images), labels))
    return Stream("small", tasks)


def embed(doing: str, done: int, total: int = 100) -> Stage:
    return Stage("task", doing, done, total)


def train(step: int) -> Stage:
    """One of 4 epochs of 5 steps."""
    epoch = (step + 4) // 5
    accuracy = 85.25 if epoch > 1 else None
    return Stage("task", "training", step, 20, Progress(epoch, 4, step, 20, (1.234,), accuracy, 1512.4, 9.0))


class Watched:
    """A reporter with a clock that is moved by hand; without runs, one of a learning."""

    def __init__(self, *runs: str, terminal: bool = False, width: int = 100):
        self.now = 1000.0
        self.file = io.StringIO()
        self.logged: list[str] = []
        console = Console(file=self.file, width=width, force_terminal=terminal, color_system=None)
        self.progress: Any = LearnProgress(console, lambda: self.now)
        if runs:
            self.progress = RunProgress(console, small_stream(), runs, self.logged.append, lambda: self.now)

    def after(self, seconds: float, stage: Stage) -> None:
        self.now += seconds
        self.progress.on_stage(stage)

    def train(self, first: int, last: int, seconds: float) -> None:
        """Steps that take `seconds` in all."""
        for step in range(first, last + 1):
            self.after(seconds / (last - first + 1), train(step))

    def task(self, i: int, seconds: float = 0.0) -> None:
        self.now += seconds
        self.progress.on_task(i, SimpleNamespace(matrix=MATRIX[: i + 1]))

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def bars(self) -> list[str]:
        """The live part as it would be drawn now."""
        console = Console(file=io.StringIO(), width=self.progress.console.width, color_system=None)
        with console.capture() as capture:
            console.print(self.progress.bars.get_renderable())
        return [" ".join(line.replace("━", "").replace("╸", "").split()) for line in capture.get().splitlines()]


def test_plain_lines_tell_runs_and_tasks() -> None:
    watched = Watched("a", "b")
    with watched.progress as progress:
        for name in "ab":
            progress.begin(name, "as [it] is")
            watched.after(1, embed("keys", 100))
            watched.after(1, train(20))
            watched.task(0)
            watched.task(1)
    run = [
        "  task 1 of 2: learned [b]c00, [b]c01; accuracy 97.0 %",
        "  task 2 of 2: learned [b]c10, [b]c11; accuracy 91.0 % over all tasks so far, 7.0 points forgotten",
    ]
    assert watched.lines() == ["a: as [it] is", *run, "b: as [it] is", *run]
    assert watched.logged == watched.lines()


def test_a_long_epoch_is_told_when_it_is_over() -> None:
    watched = Watched("cpp")
    with watched.progress as progress:
        progress.begin("cpp", "x")
        watched.train(1, 20, seconds=800)
        watched.task(0, seconds=100)
        watched.train(1, 5, seconds=200)
    told = [line for line in watched.lines() if "epoch" in line]
    assert told == [
        "  task 1 of 2, training, epoch 1 of 4: loss 1.23, 1,512 images/s, 10 min left",
        "  task 1 of 2, training, epoch 2 of 4: loss 1.23, 85.2 % right, 1,512 images/s, 7 min left",
        "  task 1 of 2, training, epoch 3 of 4: loss 1.23, 85.2 % right, 1,512 images/s, 3 min left",
        "  task 1 of 2, training, epoch 4 of 4: loss 1.23, 85.2 % right, 1,512 images/s, 0 s left",
        "  task 2 of 2, training, epoch 1 of 4: loss 1.23, 1,512 images/s, 10 min left; 12 min left in all",
    ]


def test_a_long_test_is_not_silent() -> None:
    watched = Watched("cpp")
    with watched.progress as progress:
        progress.begin("cpp", "x")
        for done in range(1000, 6000, 1000):
            watched.after(20, embed("testing", done, 5000))
    assert watched.lines()[1:] == [
        "  task 1 of 2, testing: 2,000 of 5,000, 60 s left",
        "  task 1 of 2, testing: 4,000 of 5,000, 20 s left",
    ]


def test_a_terminal_has_bars_and_the_log_has_lines() -> None:
    watched = Watched("cpp", terminal=True)
    with watched.progress as progress:
        progress.begin("cpp", "x")
        for step in range(1, 21):
            watched.after(40, train(step))
        watched.task(0)
    shown = watched.file.getvalue()
    assert "cpp: x" in shown and "task 1 of 2: learned [b]c00" in shown
    assert "training, epoch 4 of 4: loss" not in shown
    assert sum("training, epoch" in line for line in watched.logged) == 4
    assert watched.logged[0] == "cpp: x" and watched.logged[-1].startswith("  task 1 of 2: learned [b]c00")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_bars_are_nested(width: int) -> None:
    watched = Watched("[b]seed 0", "[b]seed 1", "[b]seed 2", terminal=True, width=width)
    progress = watched.progress
    progress.begin("[b]seed 0", "x")
    watched.after(10, embed("keys", 100))
    watched.train(1, 10, seconds=50)
    run, task, stage = watched.bars()
    assert (run, task) == ("1 of 3: [b]seed 0 0%", "task 1 of 2 0%")
    assert stage.startswith("training, epoch 2 of 4 50% 50 s left, loss 1.23, 85.2 % right, 1,512")
    watched.train(11, 20, seconds=50)
    watched.after(10, embed("values", 100))
    watched.after(15, embed("testing", 50))
    assert watched.bars()[1:] == ["task 1 of 2 0%", "testing 50% 15 s left, 50 of 100"]
    watched.task(0, seconds=15)
    assert watched.bars() == ["1 of 3: [b]seed 0 17% 12 min left", "task 2 of 2 50%"]
    watched.task(1)
    assert watched.bars()[1:] == ["task 2 of 2 100%"]


def test_time_left_is_that_of_the_tasks_finished_so_far() -> None:
    watched = Watched("seed 0", "seed 1")
    progress = watched.progress
    progress.begin("seed 0", "x")
    watched.after(5, embed("keys", 50))
    assert progress.time_left() is None
    watched.task(0, seconds=95)
    assert progress.time_left() == 300.0
    watched.after(30, embed("keys", 50))
    assert progress.time_left() == 270.0
    watched.now += 1000  # of a task that takes longer nothing is known but that it is not over
    assert progress.time_left() == 200.0
    watched.task(1, seconds=-830)
    assert progress.time_left() == 300.0  # two tasks of 100 and 200 seconds
    progress.begin("seed 1", "x")
    watched.task(0)
    watched.task(1)
    assert progress.time_left() == 0.0


def test_restored_tasks_are_done_but_tell_nothing_of_the_time_left() -> None:
    watched = Watched("seed 0", "seed 1", terminal=True)
    progress = watched.progress
    progress.begin("seed 0", "x", done_tasks=2)
    assert watched.bars() == ["1 of 2: seed 0 50%", "task 2 of 2 100%"]
    progress.begin("seed 1", "x", done_tasks=1)
    assert watched.bars() == ["2 of 2: seed 1 75%", "task 2 of 2 50%"]
    assert progress.time_left() is None
    watched.task(1, seconds=280)
    assert progress.seconds == [280.0] and progress.time_left() == 0.0
    assert watched.logged[:2] == ["seed 0: x", "seed 1: x"]
    assert watched.logged[2].startswith("  task 2 of 2: learned")


def test_an_empty_stage_is_done() -> None:
    watched = Watched("ncm", terminal=True)
    watched.progress.begin("ncm", "x")
    watched.after(10, embed("testing", 0, 0))
    assert watched.bars()[2] == "testing 100% 0 s left, 0 of 0"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    watched = Watched("cpp", terminal=True)
    with watched.progress as progress:
        progress.begin("cpp", "x")
        watched.after(40, train(20))
    assert any("epoch 4 of 4" in line for line in watched.lines())


# One task, as `protosteer learn` shows it


def test_learning_has_one_bar_with_the_time_left_of_its_stage() -> None:
    watched = Watched(terminal=True)
    watched.after(10, embed("keys", 20))
    assert watched.bars() == ["looking at the images 20% 40 s left, 20 of 100"]
    watched.after(40, embed("keys", 100))
    watched.train(1, 5, seconds=60)
    assert watched.bars() == ["training, round 1 of 4 25% 3 min left"]


def test_eighty_columns_hold_the_bar() -> None:
    watched = Watched(terminal=True, width=80)
    for stage in (embed("keys", 12_000, 54_321), train(13)):
        watched.after(5000, stage)
        console = Console(file=io.StringIO(), width=80, color_system=None)
        with console.capture() as capture:
            console.print(watched.progress.bars.get_renderable())
        (line,) = capture.get().splitlines()
        assert line.count("━") + line.count("╸") >= 3 and "…" not in line


def test_steps_of_an_interrupted_training_took_no_time_now() -> None:
    watched = Watched(terminal=True)
    watched.after(10, embed("keys", 100))
    watched.after(5, train(16))  # fifteen were made before
    assert "80% 20 s left" in watched.bars()[0]
    watched.after(7, train(17))
    assert "85% 18 s left" in watched.bars()[0]


def test_learning_speaks_seldom_where_there_is_no_terminal() -> None:
    watched = Watched()
    with watched.progress:
        watched.after(1, embed("keys", 100))
        watched.train(1, 20, seconds=100)
    assert watched.lines() == [
        "  training, round 2 of 4: 50 s left",
        "  training, round 4 of 4: 0 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5400, "90 min"), (3 * 3600 + 300, "3 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
