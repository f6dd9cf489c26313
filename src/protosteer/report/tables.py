"""Format metrics and accuracy matrices as tables for terminals and pipes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from protosteer.evaluation.metrics import Matrix, over_seeds
from protosteer.util.text import printable

Row = tuple[str, Sequence[Mapping[str, Any]]]  # a label, and the metrics of each seed

NOTHING = "–"  # in the cell of a metric that a method does not have
LABEL_WIDTH = 24  # characters of a run's name; longer ones wrap
LONG_SECONDS = 100  # from which seconds have no decimals
# Accuracy matrices: with more tasks, first headings, then cells get narrower; at last a matrix is split.
WORDY_TASKS = 6
DECIMAL_TASKS = 12
MAX_TASKS = 20


@dataclass(frozen=True)
class Metric:
    """How a metric is named and formatted; an accuracy is a mean over `average`."""

    heading: str
    unit: str = ""
    decimals: int = 2
    average: str = ""

    @property
    def title(self) -> str:
        """Return heading, unit and average, for tables whose cells are bare numbers."""
        unit = f" ({self.unit})" if self.unit else ""
        return self.heading + unit + (f", mean over {self.average}" if self.average else "")

    def number(self, value: float | None, std: float | None = None, sign: str = " ±") -> str:
        """Format a value and its standard deviation, unless that is the 0 of a count."""
        if value is None or math.isnan(value):
            return NOTHING
        decimals = 0 if self.unit == "s" and value >= LONG_SECONDS else self.decimals
        text = f"{value:,.{decimals}f}"
        return text if std is None or (std == 0 and not self.decimals) else f"{text}{sign}{std:,.{decimals}f}"

    def text(self, value: float | None) -> str:
        """Format a value with its unit."""
        number = self.number(value)
        return f"{number} {self.unit}" if self.unit and number != NOTHING else number


# The metrics of a run by the names that every command uses.
METRICS = {
    "last_accuracy": Metric("Last accuracy", "%", average="tasks"),
    "avg_accuracy": Metric("Avg accuracy", "%", average="tasks"),
    "last_image_accuracy": Metric("Last accuracy", "%", average="images"),
    "avg_image_accuracy": Metric("Avg accuracy", "%", average="images"),
    "anytime_accuracy": Metric("Anytime accuracy", "%", average="images learned"),
    "blurred_images": Metric("Images in other tasks", "%"),
    "last_forgetting": Metric("Forgetting"),
    "avg_forgetting": Metric("Avg forgetting"),
    "clipped_forgetting": Metric("Forgetting, clipped at 0"),
    "backward_transfer": Metric("Backward transfer"),
    "forward_transfer": Metric("Forward transfer"),
    "task_incremental_accuracy": Metric("Last accuracy, task given", "%", average="tasks"),
    "calibration_error": Metric("Calibration error", "%"),
    "retrieval_accuracy": Metric("Task retrieved", "%"),
    "passes_per_image": Metric("Passes per image"),
    "overall_passes_per_image": Metric("Passes per image, all tests"),
    "prompts_per_image": Metric("Prompts per image"),
    "overall_prompts_per_image": Metric("Prompts per image, all tests"),
    "bytes_per_task": Metric("Bytes per task", decimals=0),
    "bytes_per_class": Metric("Bytes per class", decimals=0),
    "prompt_bytes_per_task": Metric("Prompt bytes per task", decimals=0),
    "appendix_bytes_per_class": Metric("Bytes per class, CPP's appendix", decimals=0),
    "trained_parameters": Metric("Trained parameters", decimals=0),
    "train_seconds": Metric("Learning", "s", decimals=1),
    "eval_seconds": Metric("Testing", "s", decimals=1),
    "diagnosis_forward_passes": Metric("Forward passes for the diagnosis", decimals=0),
    "forward_passes": Metric("Forward passes in tests", decimals=0),
    "naive_forward_passes": Metric("Forward passes, naive protocol", decimals=0),
}
SUMMARY = (
    "last_accuracy", "avg_accuracy", "last_forgetting", "calibration_error", "passes_per_image", "bytes_per_class",
)  # fmt: skip

# The diagnosis by the names of `Method.diagnose`; which of them there are depends on the method.
DIAGNOSIS = {
    "accuracy": Metric("Right", "%"),
    "same_task": Metric("Other class of the task", "%"),
    "other_task": Metric("Class of another task", "%"),
    "not_retrieved": Metric("Task not retrieved", "%"),
    "wrong_prompt_won": Metric("Wrong prompt won", "%"),
    "wrong_class": Metric("Wrong class", "%"),
    "true_task_with_prompt": Metric("True task, with prompt", "%"),
    "true_task_without_prompt": Metric("True task, no prompt", "%"),
    "key_spread": Metric("Key spread", decimals=3),
    "value_spread": Metric("Value spread", decimals=3),
    "task_not_tried": Metric("Task not tried", "%"),
    "coarse_wrong": Metric("Shared score wrong", "%"),
    "fine_wrong": Metric("Prompt score wrong", "%"),
    "coarse_accuracy": Metric("Right by shared score", "%"),
    "true_task_accuracy": Metric("Right, true task given", "%"),
    "confidence": Metric("Mean confidence", "%"),
    "passes": Metric("Passes per image"),
}
# The same as narrow columns; a task has too few test images for a second decimal.
SHORT_DIAGNOSIS = {
    name: replace(metric, heading=metric.heading.replace(" ", "\n"), decimals=1 if metric.unit else metric.decimals)
    for name, metric in DIAGNOSIS.items()
}
# Measured after each task, besides the matrix.
MOMENTS = {
    "accuracy_over_tasks": Metric("Acc. (%),\nmean over\ntasks"),
    "accuracy_over_images": Metric("Acc. (%),\nmean over\nimages"),
    "seen_accuracy": Metric("Acc. (%),\nclasses\nseen"),
    "forgetting": Metric("Forgetting"),
    "calibration_error": Metric("Calibration\nerror (%)"),
    "retrieval_accuracy": Metric("Task\nretrieved\n(%)"),
    "passes_per_image": Metric("Passes per\nimage"),
}


def metrics_table(rows: Mapping[str, Mapping[str, float | None]], title: str | None = None) -> Table:
    """Show the most important metrics with units, one row per run."""
    table = plain_table(title, labels(), *numbers(METRICS[name].heading for name in SUMMARY))
    for name, values in rows.items():
        table.add_row(label(name), *(METRICS[key].text(values.get(key)) for key in SUMMARY))
    return table


def spread_table(
    title: str | None, metrics: Mapping[str, Metric], rows: Sequence[Row], count_runs: bool = False
) -> Table:
    """Show means and standard deviations over seeds, one line per row; a metric that no row has is skipped."""
    metrics = present(metrics, rows)
    headings = numbers(metric.heading for metric in metrics.values())
    table = plain_table(title, labels(), *numbers(["n"] if count_runs else []), *headings)
    for name, seeds in rows:
        mean, std = spread_over_seeds(seeds)
        # A narrow cell breaks before the sign, which stays with its deviation.
        cells = (metric.number(mean.get(key), std.get(key)) for key, metric in metrics.items())
        table.add_row(label(name), *([str(len(seeds))] if count_runs else []), *cells)
    return table


def spread_over_seeds(seeds: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Compute mean and sample standard deviation of metrics that all seeds have; one seed has no deviation."""
    mean, std = over_seeds(seeds)
    return mean, std if len(seeds) > 1 else {}


def present(metrics: Mapping[str, Metric], rows: Iterable[Row]) -> dict[str, Metric]:
    """Select the metrics that at least one row has."""
    names = {name for _, seeds in rows for name in over_seeds(seeds)[0]}
    return {name: metric for name, metric in metrics.items() if name in names}


def matrix_tables(matrix: Matrix, title: str | None = None) -> list[Table]:
    """Show an accuracy matrix: row i has the accuracy in percent on each task after task i was learned."""
    tasks = range(len(matrix))
    parts = [tasks[start : start + MAX_TASKS] for start in tasks[::MAX_TASKS]]
    return [_matrix_part(matrix, None if part[0] else title, part) for part in parts]


def _matrix_part(matrix: Matrix, title: str | None, columns: range) -> Table:
    has_words, decimals = len(matrix) <= WORDY_TASKS, int(len(matrix) <= DECIMAL_TASKS)
    column_prefix, row_prefix = ("on task ", "after task") if has_words else ("", "after")
    headings = numbers((f"{column_prefix}{j + 1}" for j in columns), no_wrap=not has_words)
    table = plain_table(title, Column(no_wrap=True), *headings)
    if not has_words:
        table.padding = 0
    for i, row in enumerate(matrix[columns[0] :], columns[0] + 1):
        cells = row[columns[0] : columns[-1] + 1]
        table.add_row(f"{row_prefix} {i}", *(f"{value:.{decimals}f}" for value in cells))
    return table


def run_report(figures: Mapping[str, Any]) -> list[Table]:
    """Report one run, of one seed or of several as `run --json` prints them: matrix, averages, costs, diagnosis."""
    seeds: Sequence[Mapping[str, Any]] = figures.get("seeds", [figures])
    parts = []
    for seed in seeds:
        suffix = f", seed {seed['seed']}" if len(seeds) > 1 else ""
        parts += matrix_tables(seed["matrix"], f"Accuracy (%) after each task{suffix}")
    if all(seed.get("after_each_task") for seed in seeds):
        moments = enumerate(zip(*(seed["after_each_task"] for seed in seeds), strict=True), 1)
        parts.append(spread_table(None, MOMENTS, [(f"after {i}", moment) for i, moment in moments]))
    mean, std = spread_over_seeds(seeds)
    parts += [_averages(mean, std), _costs(mean, std)]
    if all(seed.get("diagnosis") for seed in seeds):
        parts.append(_diagnosis([seed["diagnosis"] for seed in seeds]))
    return parts


def _averages(mean: Mapping[str, float], std: Mapping[str, float]) -> Table:
    table = plain_table(None, "", *numbers(["mean over tasks", "mean over images"]))
    rows = (
        ("Last accuracy (%)", "last_accuracy", "last_image_accuracy"),
        ("Avg accuracy (%)", "avg_accuracy", "avg_image_accuracy"),
        ("Anytime accuracy (%)", "", "anytime_accuracy"),
        ("Last forgetting (points)", "last_forgetting"),
        ("Avg forgetting (points)", "avg_forgetting"),
    )
    for heading, *names in rows:
        cells = (METRICS[name].number(mean.get(name), std.get(name)) if name else "" for name in names)
        table.add_row(heading, *cells)
    return table


def _costs(mean: Mapping[str, float], std: Mapping[str, float]) -> Table:
    """Show costs; metrics that the method does not have are skipped."""
    table = plain_table(None, "", *numbers([""]))
    table.show_header = False
    names = list(METRICS)
    for name in names[names.index("calibration_error") :]:
        if name in mean:
            table.add_row(METRICS[name].title, METRICS[name].number(mean[name], std.get(name)))
    if "forward_passes" in mean and mean.get("naive_forward_passes"):
        ratio = mean["forward_passes"] / mean["naive_forward_passes"]
        table.add_row("Forward passes, made / naive", f"{ratio:.2f}")
    return table


def _diagnosis(seeds: Sequence[Mapping[str, Any]]) -> Table:
    """Show the diagnosis per task and its mean, averaged over seeds; deviations would not fit."""
    tasks = [(rows[0]["task"], rows) for rows in zip(*(seed["tasks"] for seed in seeds), strict=True)]
    rows = [*tasks, ("mean", [seed["mean"] for seed in seeds])]
    means = [(name, [over_seeds(values)[0]]) for name, values in rows]
    title = "Diagnosis after the last task (%; spread: mean cosine; passes: number)"
    table = spread_table(title, SHORT_DIAGNOSIS, means)
    table.rows[-2].end_section = True
    return table


def trials_table(trials: Sequence[Any]) -> Table:
    """Show the settings that were tried and their validation accuracy, the best first."""
    names = list(trials[0].settings)
    table = plain_table("Accuracy (%) on validation images of the first task", *numbers([*names, "accuracy"]))
    for trial in trials:
        table.add_row(*(str(trial.settings[name]) for name in names), f"{trial.accuracy:.2f}")
    return table


def plain_table(title: str | None = None, *columns: Column | str) -> Table:
    """Make a table in the common style: one line below the headings, no other."""
    heading = None if title is None else Text(title, style="bold")  # never markup
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    return _TextTable(*columns, title=heading, title_justify="left", **style)


class _TextTable(Table):
    """A table that never parses its texts as markup, since they may be names from a file."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def plain(words: str) -> Text:
    """Return text as it is, without control characters."""
    return Text(printable(words))


def labels(heading: str = "") -> Column:
    """Make the first column; its names do not wrap when other columns need room."""
    return Column(heading, style="bold", no_wrap=True)


def numbers(headings: Iterable[str], no_wrap: bool = False) -> list[Column]:
    """Make right-aligned columns."""
    return [Column(heading, justify="right", no_wrap=no_wrap) for heading in headings]


def label(name: str) -> Text:
    """Wrap a name to `LABEL_WIDTH`; it is never parsed as markup."""
    return Text("\n".join(textwrap.wrap(printable(name), LABEL_WIDTH)) or printable(name))
