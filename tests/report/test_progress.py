"""Progress of runs: what a terminal, a pipe and a log file see, and when the end is foreseen."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from conftest import easy_task
from protosteer.data.images import ArrayImages
from protosteer.report.progress import Costs, LearnProgress, RunProgress, duration
from protosteer.running.progress import Progress, Stage
from protosteer.streams.base import Stream, Task

MATRIX = [[97.0], [90.0, 92.0]]
COSTS = {"keys": 10.0, "training": 100.0, "values": 10.0, "testing": 30.0}  # 150 a task, 300 a run


def small_stream(classes: int = 2) -> Stream:
    tasks = []
    for i in range(2):
        names = [f"[b]c{i}{k}" for k in range(classes)]
        images, labels = easy_task(names, per_class=1)
        tasks.append(Task(f"task-{i}", names, ArrayImages(images), labels, ArrayImages(images), labels))
    return Stream("small", tasks)


def embed(doing: str, done: int, total: int = 100) -> Stage:
    return Stage("task", doing, done, total)


def train(step: int) -> Stage:
    """One of 4 epochs of 5 steps."""
    epoch = (step + 4) // 5
    accuracy = 85.25 if epoch > 1 else None
    return Stage("task", "training", step, 20, Progress(epoch, 4, step, 20, 1.234, accuracy, 1512.4, 9.0))


class Watched:
    """A RunProgress with a clock that is moved by hand."""

    def __init__(
        self, terminal: bool = False, runs: dict[str, Costs] | None = None, width: int = 100, classes: int = 2
    ):
        self.now = 1000.0
        self.file = io.StringIO()
        self.logged: list[str] = []
        console = Console(file=self.file, width=width, force_terminal=terminal, color_system=None)
        self.progress = RunProgress(
            console,
            small_stream(classes),
            runs or {"cpp": lambda _: COSTS},
            self.logged.append,
            lambda: self.now,
        )

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
        return [
            " ".join(line.replace("━", "").replace("╸", "").split()) for line in capture.get().splitlines()
        ]


def test_plain_lines_tell_runs_and_tasks() -> None:
    watched = Watched(runs={"a": lambda _: COSTS, "b": lambda _: COSTS})
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
    watched = Watched()
    with watched.progress as progress:
        progress.begin("cpp", "x")
        for step in range(1, 21):
            watched.after(40, train(step))
    epochs = [line for line in watched.lines() if "epoch" in line]
    assert len(epochs) == 4
    assert epochs[0].startswith("  task 1 of 2, training, epoch 1 of 4: loss 1.23, 1,512 images/s, ")
    assert epochs[1].startswith(
        "  task 1 of 2, training, epoch 2 of 4: loss 1.23, 85.2 % right, 1,512 images/s, "
    )
    assert epochs[1].endswith(" min left")


def test_short_epochs_share_a_line_in_thirty_seconds() -> None:
    watched = Watched()
    with watched.progress as progress:
        progress.begin("cpp", "x")
        for step in range(1, 21):
            watched.after(4, train(step))  # 20 seconds an epoch
    assert [line.split(":")[0] for line in watched.lines()[1:]] == [
        "  task 1 of 2, training, epoch 2 of 4",
        "  task 1 of 2, training, epoch 4 of 4",
    ]


def test_a_long_test_is_not_silent() -> None:
    watched = Watched()
    with watched.progress as progress:
        progress.begin("cpp", "x")
        for done in range(1000, 6000, 1000):
            watched.after(20, embed("testing", done, 5000))
    told = [line for line in watched.lines() if "testing" in line]
    assert [line.split(": ")[1].split(" left")[0].rsplit(", ", 1)[0] for line in told] == [
        "2,000 of 5,000",
        "4,000 of 5,000",
    ]


def test_a_terminal_has_bars_and_the_log_has_lines() -> None:
    watched = Watched(terminal=True)
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


def test_no_control_codes_where_there_is_no_terminal() -> None:
    watched = Watched(terminal=False)
    with watched.progress as progress:
        progress.begin("cpp", "x")
        watched.after(40, train(20))
        watched.task(0)
    assert "\x1b" not in watched.file.getvalue() and "━" not in watched.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_bars_are_nested(width: int) -> None:
    watched = Watched(terminal=True, runs={f"[b]seed {i}": lambda _: COSTS for i in range(3)}, width=width)
    progress = watched.progress
    progress.estimate.start(watched.now)
    progress.begin("[b]seed 0", "x")
    watched.after(10, embed("keys", 100))
    watched.train(1, 10, seconds=50)
    # 60 of 900 units of work are done, in a minute
    assert watched.bars() == [
        "1 of 3: [b]seed 0 7% 14 min left",
        "task 1 of 2 20%",
        "training, epoch 2 of 4 50% loss 1.23, 85.2 % right, 1,512 images/s",
    ]
    watched.train(11, 20, seconds=50)
    watched.after(10, embed("values", 100))
    watched.after(15, embed("testing", 50))
    assert watched.bars()[1:] == ["task 1 of 2 45%", "testing 50% 50 of 100"]
    watched.task(0, seconds=15)
    assert watched.bars() == ["1 of 3: [b]seed 0 17% 12 min left", "task 2 of 2 50%"]
    watched.task(1)
    assert watched.bars()[1:] == ["task 2 of 2 100%"]


def test_time_left_is_known_early_and_counts_down() -> None:
    watched = Watched()
    with watched.progress as progress:
        progress.begin("cpp", "x")
        assert progress.time_left() is None
        watched.after(5, embed("keys", 50))  # a second a unit: 295 are left
        assert progress.time_left() == pytest.approx(295)
        watched.now += 7
        assert progress.time_left() == pytest.approx(288)
        watched.now += 1000
        assert progress.time_left() == 0.0


def test_testing_that_is_not_reported_counts_when_the_task_ends() -> None:
    watched = Watched()
    with watched.progress as progress:
        progress.begin("cpp", "x")
        watched.after(10, embed("keys", 100))
        watched.train(1, 20, seconds=100)
        watched.after(10, embed("values", 100))
        watched.task(0, seconds=30)
        assert progress.time_left() == pytest.approx(150)
        watched.task(1, seconds=150)
        assert progress.time_left() == 0.0 and progress.estimate.share == pytest.approx(1.0)


def test_restored_tasks_are_done_but_foretell_nothing() -> None:
    watched = Watched(runs={"seed 0": lambda _: COSTS, "seed 1": lambda _: COSTS})
    with watched.progress as progress:
        progress.begin("seed 0", "x", done_tasks=2)
        assert progress.time_left() is None and progress.estimate.share == 0.5
        progress.begin("seed 1", "x", done_tasks=1)
        assert progress.time_left() is None and progress.estimate.share == 0.75
        watched.after(20, embed("keys", 100))  # 10 of 150 units, 2 seconds each
        assert progress.time_left() == pytest.approx(280)
        watched.task(1, seconds=280)
    assert watched.lines()[:2] == ["seed 0: x", "seed 1: x"]
    assert watched.lines()[2].startswith("  task 2 of 2: learned")


def test_steps_of_an_interrupted_training_foretell_nothing() -> None:
    watched = Watched()
    with watched.progress as progress:
        progress.begin("cpp", "x")
        watched.after(10, embed("keys", 100))
        watched.after(5, train(16))  # 15 steps were done before the interruption, this one took 5 s
        assert progress.estimate.share == pytest.approx((10 + 80) / 300)
        assert progress.time_left() == pytest.approx(300 - 90)


def test_stages_without_a_cost_are_shown_but_count_for_nothing() -> None:
    watched = Watched(terminal=True, runs={"ncm": lambda _: {"keys": 10.0}, "none": lambda _: {}})
    progress = watched.progress
    progress.estimate.start(watched.now)
    progress.begin("ncm", "x")
    watched.after(10, embed("keys", 100))
    watched.after(10, embed("testing", 0, 0))
    assert watched.bars()[1:] == ["task 1 of 2 50%", "testing 100% 0 of 0"]
    watched.task(0)
    watched.task(1)
    watched.after(10, embed("diagnosis", 1))
    assert watched.bars()[2].startswith("diagnosis 1%")
    progress.begin("none", "x")
    watched.after(1, embed("keys", 1))
    watched.task(0)


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    watched = Watched(terminal=True)
    with watched.progress as progress:
        progress.begin("cpp", "x")
        watched.after(40, train(20))
    assert any("epoch 4 of 4" in line for line in watched.lines())


def test_many_classes_are_counted() -> None:
    watched = Watched(classes=12)
    with watched.progress as progress:
        progress.begin("cpp", "x")
        watched.task(0)
    assert "[b]c07 and 4 more; accuracy" in watched.lines()[1] and "[b]c08" not in watched.lines()[1]


# One task, as `protosteer learn` shows it


class Learning(Watched):
    """The same for a LearnProgress."""

    def __init__(self, terminal: bool = False):
        self.now = 1000.0
        self.file = io.StringIO()
        console = Console(file=self.file, width=100, force_terminal=terminal, color_system=None)
        self.progress = LearnProgress(console, COSTS, lambda: self.now)


def test_learning_has_two_bars_and_foresees_its_end() -> None:
    watched = Learning(terminal=True)
    assert watched.bars() == ["getting ready 0%"]
    watched.progress.estimate.start(watched.now)
    watched.after(10, embed("keys", 100))
    assert watched.bars() == ["learning task 7% 2 min left", "keys 100% 100 of 100"]
    watched.train(1, 20, seconds=100)
    assert watched.bars()[0] == "learning task 73% 40 s left" and "epoch 4 of 4 100%" in watched.bars()[1]


def test_learning_that_goes_on_foretells_by_what_it_did_itself() -> None:
    watched = Learning()
    watched.progress.estimate.start(watched.now)
    watched.after(10, embed("keys", 100))
    watched.after(5, train(16))  # the fifteen steps before were made by an interrupted learning
    assert watched.progress.time_left() == pytest.approx(60)


def test_learning_speaks_seldom_where_there_is_no_terminal() -> None:
    watched = Learning()
    with watched.progress:
        watched.after(1, embed("keys", 100))
        watched.train(1, 20, seconds=100)
    lines = watched.lines()
    assert len(lines) == 2 and lines[0].startswith("  training, epoch 2 of 4: loss 1.23")
    assert lines[0].endswith(" left") and not any(line.startswith("\x1b") for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5400, "90 min"), (3 * 3600 + 300, "3 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
