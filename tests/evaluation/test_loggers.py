"""Loggers: TensorBoard read back by its own reader, the others by what they are called with."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from expect import expect_error
from protosteer.errors import SettingsError
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.evaluation.loggers import LoggingReporter, flattened
from protosteer.runtime.progress import Progress, Stage

pytestmark = pytest.mark.slow

VALUES = {
    "stream": "split-digits", "method": "cpp", "tasks": 2, "train_per_class": 4, "test_per_class": 2, "device": "cpu",
    "epochs": 2, "batch_size": 10, "neck_hidden": 16, "augmentation": "none", "seeds": "0,1",
}  # fmt: skip


def run(out: Path, logger: str, **options: Any) -> dict[str, Any]:
    return run_experiment(Experiment.from_values({**VALUES, "out": out}), logger=logger, **options)


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    figures = run(tmp_path / "r", "tensorboard")
    for seed in figures["seeds"]:
        found = EventAccumulator(str(tmp_path / "r" / f"seed-{seed['seed']}"))
        found.Reload()
        after = seed["after_each_task"]
        for k, row in enumerate(after, 1):
            events = found.Scalars(f"loss/task-{k}")
            assert [event.step for event in events] == [1, 2]
            assert [event.value for event in events] == pytest.approx(row["losses"][0])
        curve = found.Scalars("accuracy_over_tasks")
        assert [(e.step, e.value) for e in curve] == [
            (i, pytest.approx(row["accuracy_over_tasks"])) for i, row in enumerate(after, 1)
        ]
        assert [event.step for event in found.Scalars("accuracy/task-2")] == [2]
        text = found.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
        assert "settings.epochs: 2" in text and "stream.name: split-digits" in text
    run(tmp_path / "r", "tensorboard", resume=True)  # nothing is left to log


class Calls:
    """Records calls of any method."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **values: Any) -> Any:
            self.made.append((name, words, values))
            return self if name == "init" else SimpleNamespace(info=SimpleNamespace(run_id="7"))

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [call[1:] for call in self.made if call[0] == name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    for name in ("wandb", "mlflow"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for function in ("init", "start_run", "log_params", "log_metrics", "end_run"):
            setattr(module, function, getattr(made, function))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return made


def test_wandb_gets_a_run_per_seed_with_axes(tmp_path: Path, calls: Calls) -> None:
    run(tmp_path / "r", "wandb")
    starts = calls.named("init")
    assert [values["name"] for _, values in starts] == ["r, seed 0", "r, seed 1"]
    assert starts[0][1]["project"] == "protosteer" and starts[0][1]["config"]["settings.epochs"] == 2
    logged = [words[0] for words, _ in calls.named("log")]
    assert [values["epoch"] for values in logged if "loss/task-1" in values] == [1, 2, 1, 2]
    assert [values["task"] for values in logged if "forgetting" in values] == [1, 2, 1, 2]
    assert len(calls.named("finish")) == 2


def test_mlflow_gets_parameters_and_metrics(tmp_path: Path, calls: Calls) -> None:
    run(tmp_path / "r", "mlflow")
    assert [values["run_name"] for _, values in calls.named("start_run")] == ["r, seed 0", "r, seed 1"]
    assert calls.named("log_params")[0][0][0]["method"] == "cpp"
    logged = [(words[0], values["step"]) for words, values in calls.named("log_metrics")]
    assert [step for values, step in logged if "accuracy/task-1" in values] == [1, 2, 1, 2]
    assert len(calls.named("end_run")) == 2


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with expect_error("missing-extra", SettingsError, name=name):
        run(tmp_path / "r", name)
    assert not (tmp_path / "r").exists()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with expect_error("unknown-logger", SettingsError, name="tensorbord"):
        run(tmp_path / "r", "tensorbord")
    with expect_error("remote-logger", SettingsError):
        run(tmp_path / "r", "tensorboard", engine=SimpleNamespace(is_remote=True))
    assert flattened({"a": {"b": 1, "c": [2]}, "d": None}) == {"a.b": 1, "d": None}


def test_a_second_training_of_a_task_has_its_own_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, int]] = []
    made = SimpleNamespace(log=lambda values, axis, step: logged.append((next(iter(values)), step)), close=lambda: None)
    monkeypatch.setattr(
        "protosteer.evaluation.loggers.LOGGERS", {"json": lambda *words: made}
    )  # a module that is there
    quiet = SimpleNamespace(begin=lambda *_: None, on_stage=lambda _: None)
    reporter = LoggingReporter(quiet, "json", tmp_path, {})
    reporter.begin("seed 0", "")
    for task in ("a", "a", "b"):
        for step in (1, 2, 3, 4):
            losses = tuple(1.0 for _ in range((step + 1) // 2))
            progress = Progress(len(losses), 2, step, 4, losses, None, 1.0, 1.0)
            reporter.on_stage(Stage(task, "training", step, 4, progress))
    assert logged == [(name, epoch) for name in ("loss/a", "loss/a/2", "loss/b") for epoch in (1, 2)]
