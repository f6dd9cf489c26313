"""Loggers of runs: TensorBoard, Weights & Biases, MLflow. Each is an extra, imported when it is chosen.

A run has a log for each seed: the loss of every epoch, and after each task its metrics and the accuracy on every task so
far. Loggers get what reporters get (`seed_runs.Reporter`), so methods and protocol know nothing of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from protosteer.errors import SettingsError
from protosteer.evaluation import metrics
from protosteer.evaluation.protocol import Run
from protosteer.runtime.progress import Stage
from protosteer.util.text import suggestion

PROJECT = "protosteer"
EPOCH, TASK = "epoch", "task"  # what the steps of a value count


class Logger(Protocol):
    """One run's log."""

    def log(self, values: Mapping[str, float], axis: str, step: int) -> None:
        """Log values by name at a step, counted in epochs or tasks."""

    def close(self) -> None:
        """Finish the log."""


class TensorBoardLogger:
    """Event files in the folder of the seed; show them with `tensorboard` on the run folder."""

    def __init__(self, folder: Path, name: str, configuration: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))
        lines = "".join(f"    {key}: {value}\n" for key, value in flattened(configuration).items())
        self.writer.add_text("configuration", lines)

    def log(self, values: Mapping[str, float], axis: str, step: int) -> None:
        """Add scalars."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


class WandbLogger:
    """A run of Weights & Biases; its environment variables choose the project, the account and offline mode."""

    def __init__(self, folder: Path, name: str, configuration: Mapping[str, Any]):
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        config, project = flattened(configuration), os.environ.get("WANDB_PROJECT", PROJECT)
        self.run = wandb.init(name=name, config=config, dir=str(folder), reinit=True, project=project)
        for axis in (EPOCH, TASK):
            self.run.define_metric(axis)
        self.run.define_metric("loss/*", step_metric=EPOCH)
        self.run.define_metric("*", step_metric=TASK)

    def log(self, values: Mapping[str, float], axis: str, step: int) -> None:
        """Log values with their own axis."""
        self.run.log({**values, axis: step})

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class MlflowLogger:
    """A run of MLflow; its environment variables choose the server and the experiment."""

    def __init__(self, folder: Path, name: str, configuration: Mapping[str, Any]):
        import mlflow

        self.mlflow = mlflow
        self.id = mlflow.start_run(run_name=name).info.run_id
        mlflow.log_params({key: str(value)[:500] for key, value in flattened(configuration).items()})

    def log(self, values: Mapping[str, float], axis: str, step: int) -> None:
        """Log values at the step."""
        self.mlflow.log_metrics(dict(values), step=step, run_id=self.id)

    def close(self) -> None:
        """End the run."""
        self.mlflow.end_run()


LOGGERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def find_logger(name: str) -> Callable[[Path, str, Mapping[str, Any]], Logger]:
    """Return the logger of a name.

    Raises:
        SettingsError: There is none (code "unknown-logger"), or its package is not installed (code "missing-extra").
    """
    if name not in LOGGERS:
        message = f"no logger is called '{name}'; {suggestion(name, LOGGERS)}"
        raise SettingsError(message, code="unknown-logger", name=name)
    if find_spec(name) is None:
        message = f"the logger {name} is not installed; run: pip install 'protosteer[{name}]'"
        raise SettingsError(message, code="missing-extra", name=name)
    return LOGGERS[name]


class LoggingReporter:
    """Logs the progress of the seeds of a run, and passes it on to another reporter.

    Args:
        reporter: The other reporter.
        logger: The name of the logger.
        folder: The run folder.
        configuration: What determines the results.
    """

    def __init__(self, reporter: Any, logger: str, folder: Path, configuration: Mapping[str, Any]):
        self.reporter, self.folder, self.configuration = reporter, folder, configuration
        self.make = find_logger(logger)
        self.logger: Logger | None = None
        self.run, self.task, self.epoch, self.training = "", "", 0, 1

    def __enter__(self) -> LoggingReporter:
        self.reporter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        self.reporter.__exit__(*error)

    def begin(self, name: str, about: str, done_tasks: int = 0) -> None:
        """Close the log of the seed before; that of this seed is opened with its first value."""
        self._close()
        self.run = name
        self.reporter.begin(name, about, done_tasks)

    def on_stage(self, stage: Stage) -> None:
        """Log the loss at the end of an epoch; a task's second training has a curve of its own."""
        progress = stage.training
        if progress and progress.step * progress.epochs % progress.steps == 0:
            again = stage.task == self.task and progress.epoch <= self.epoch
            self.training = self.training + 1 if again else (self.training if stage.task == self.task else 1)
            self.task, self.epoch = stage.task, progress.epoch
            name = f"loss/{stage.task}" + (f"/{self.training}" if self.training > 1 else "")
            self._log({name: progress.loss}, EPOCH, progress.epoch)
        self.reporter.on_stage(stage)

    def on_task(self, i: int, run: Run) -> None:
        """Log the metrics after task i."""
        row = run.rows[i]
        values = {
            "accuracy_over_tasks": metrics.average_accuracy(run.matrix, i),
            "accuracy_over_images": metrics.image_accuracy(run.matrix, i, run.test_images),
            "forgetting": metrics.forgetting(run.matrix, i),
            **{f"accuracy/task-{j + 1}": value for j, value in enumerate(row["accuracy"])},
            **{name: value for name, value in row.items() if isinstance(value, (int, float))},
        }
        self._log({name: float(value) for name, value in values.items() if math.isfinite(value)}, TASK, i + 1)
        self.reporter.on_task(i, run)

    def say(self, line: str) -> None:
        """Pass a message on."""
        self.reporter.say(line)

    def _log(self, values: Mapping[str, float], axis: str, step: int) -> None:
        if self.logger is None:
            place = self.folder / self.run.replace(" ", "-")
            self.logger = self.make(place, f"{self.folder.name}, {self.run}", self.configuration)
        self.logger.log(values, axis, step)

    def _close(self) -> None:
        if self.logger is not None:
            self.logger.close()
        self.logger = None


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to `settings.epochs` and so on; lists are omitted."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        elif not isinstance(value, (list, tuple)):
            flat[f"{prefix}{key}"] = value
    return flat
