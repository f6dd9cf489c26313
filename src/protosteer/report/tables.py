"""Figures and accuracy matrices as text, for terminals and pipes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from protosteer.evaluation.metrics import Matrix, over_seeds
from protosteer.util.text import printable

Row = tuple[str, Sequence[Mapping[str, Any]]]  # a label, and the figures of each seed

NOTHING = "–"  # where a method has no such figure
LABEL_WIDTH = 24  # of a run's name; longer ones go on in the next line
LONG_SECONDS = 100  # and more are written without decimals
# Accuracy matrices: with more tasks, headings, then cells get narrower; at last the columns are shared out.
WORDY_TASKS = 6
DECIMAL_TASKS = 12
MOST_TASKS = 20


@dataclass(frozen=True)
class Figure:
    """How a figure is named and written. `average`: what an accuracy is the mean over."""

    heading: str
    unit: str = ""
    decimals: int = 2
    average: str = ""

    @property
    def title(self) -> str:
        """Heading with unit and average, for tables whose cells are bare numbers."""
        unit = f" ({self.unit})" if self.unit else ""
        return self.heading + unit + (f", mean over {self.average}" if self.average else "")

    def number(self, value: float | None, std: float | None = None, sign: str = " ±") -> str:
        """The bare number, and its standard deviation unless that is the 0 of a plain count."""
        if value is None or math.isnan(value):
            return NOTHING
        decimals = 0 if self.unit == "s" and value >= LONG_SECONDS else self.decimals
        text = f"{value:,.{decimals}f}"
        return text if std is None or (std == 0 and not self.decimals) else f"{text}{sign}{std:,.{decimals}f}"

    def text(self, value: float | None) -> str:
        number = self.number(value)
        return f"{number} {self.unit}" if self.unit and number != NOTHING else number


# The figures of a run by the names that every command uses.
FIGURES = {
    "last_accuracy": Figure("Last accuracy", "%", average="tasks"),
    "avg_accuracy": Figure("Avg accuracy", "%", average="tasks"),
    "last_image_accuracy": Figure("Last accuracy", "%", average="images"),
    "avg_image_accuracy": Figure("Avg accuracy", "%", average="images"),
    "anytime_accuracy": Figure("Anytime accuracy", "%", average="images learned"),
    "blurred_images": Figure("Images in other tasks", "%"),
    "last_forgetting": Figure("Forgetting"),
    "avg_forgetting": Figure("Avg forgetting"),
    "calibration_error": Figure("Calibration error", "%"),
    "retrieval_accuracy": Figure("Task retrieved", "%"),
    "passes_per_image": Figure("Passes per image"),
    "overall_passes_per_image": Figure("Passes per image, all tests"),
    "prompts_per_image": Figure("Prompts per image"),
    "overall_prompts_per_image": Figure("Prompts per image, all tests"),
    "bytes_per_task": Figure("Bytes per task", decimals=0),
    "bytes_per_class": Figure("Bytes per class", decimals=0),
    "trained_parameters": Figure("Trained parameters", decimals=0),
    "train_seconds": Figure("Learning", "s", decimals=1),
    "eval_seconds": Figure("Testing", "s", decimals=1),
    "diagnosis_forward_passes": Figure("Forward passes for the diagnosis", decimals=0),
    "forward_passes": Figure("Forward passes in tests", decimals=0),
    "naive_forward_passes": Figure("Forward passes, naive protocol", decimals=0),
}
USUAL = (
    "last_accuracy", "avg_accuracy", "last_forgetting", "calibration_error", "passes_per_image", "bytes_per_class",
)  # fmt: skip

# The diagnosis by the names of `Method.diagnose`; which of them there are depends on the method.
DIAGNOSIS = {
    "accuracy": Figure("Right", "%"),
    "same_task": Figure("Other class of the task", "%"),
    "other_task": Figure("Class of another task", "%"),
    "not_retrieved": Figure("Task not retrieved", "%"),
    "wrong_prompt_won": Figure("Wrong prompt won", "%"),
    "wrong_class": Figure("Wrong class", "%"),
    "true_task_with_prompt": Figure("True task, with prompt", "%"),
    "true_task_without_prompt": Figure("True task, no prompt", "%"),
    "key_spread": Figure("Key spread", decimals=3),
    "value_spread": Figure("Value spread", decimals=3),
    "task_not_tried": Figure("Task not tried", "%"),
    "coarse_wrong": Figure("Coarse evidence wrong", "%"),
    "fine_wrong": Figure("Fine evidence wrong", "%"),
    "coarse_accuracy": Figure("Right by coarse evidence", "%"),
    "true_task_accuracy": Figure("Right, true task given", "%"),
    "confidence": Figure("Mean confidence", "%"),
    "passes": Figure("Passes per image"),
}
# The same as narrow columns; as a task has few test images, the second decimal of a percentage says nothing.
SHORT_DIAGNOSIS = {
    name: replace(
        figure, heading=figure.heading.replace(" ", "\n"), decimals=1 if figure.unit else figure.decimals
    )
    for name, figure in DIAGNOSIS.items()
}
# What is measured after each task, beside the matrix.
MOMENTS = {
    "accuracy_over_tasks": Figure("Acc. (%),\nmean over\ntasks"),
    "accuracy_over_images": Figure("Acc. (%),\nmean over\nimages"),
    "seen_accuracy": Figure("Acc. (%),\nclasses\nseen"),
    "forgetting": Figure("Forgetting"),
    "calibration_error": Figure("Calibration\nerror (%)"),
    "retrieval_accuracy": Figure("Task\nretrieved\n(%)"),
    "passes_per_image": Figure("Passes per\nimage"),
}


def figures_table(rows: Mapping[str, Mapping[str, float | None]], title: str | None = None) -> Table:
    """The usual figures with their units, one line per run."""
    table = plain_table(title, labels(), *numbers(FIGURES[name].heading for name in USUAL))
    for name, values in rows.items():
        table.add_row(label(name), *(FIGURES[key].text(values.get(key)) for key in USUAL))
    return table


def spread_table(
    title: str | None, figures: Mapping[str, Figure], rows: Sequence[Row], count_seeds: bool = False
) -> Table:
    """One line per row: its figures over seeds, means and deviations. What no row has is left out."""
    figures = had(figures, rows)
    headings = numbers(figure.heading for figure in figures.values())
    table = plain_table(title, labels(), *numbers(["Seeds"] if count_seeds else []), *headings)
    for name, seeds in rows:
        mean, std = spread_over_seeds(seeds)
        # Where room is short a cell breaks before the sign, so that it stays with its deviation.
        cells = (figure.number(mean.get(key), std.get(key)) for key, figure in figures.items())
        table.add_row(label(name), *([str(len(seeds))] if count_seeds else []), *cells)
    return table


def spread_over_seeds(seeds: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean and sample standard deviation of the figures that all seeds have; one seed has no deviation."""
    mean, std = over_seeds(seeds)
    return mean, std if len(seeds) > 1 else {}


def had(figures: Mapping[str, Figure], rows: Iterable[Row]) -> dict[str, Figure]:
    """Those that at least one row has."""
    found = {name for _, seeds in rows for name in over_seeds(seeds)[0]}
    return {name: figure for name, figure in figures.items() if name in found}


def matrix_tables(matrix: Matrix, title: str | None = None) -> list[Table]:
    """Row i: accuracy in percent on each task's test images when task i had just been learned."""
    tasks = range(len(matrix))
    shares = [tasks[first : first + MOST_TASKS] for first in tasks[::MOST_TASKS]]
    return [_matrix_part(matrix, None if share[0] else title, share) for share in shares]


def _matrix_part(matrix: Matrix, title: str | None, columns: range) -> Table:
    wordy, decimals = len(matrix) <= WORDY_TASKS, int(len(matrix) <= DECIMAL_TASKS)
    on, after = ("on task ", "after task") if wordy else ("", "after")
    headings = numbers((f"{on}{j + 1}" for j in columns), no_wrap=not wordy)
    table = plain_table(title, Column(no_wrap=True), *headings)
    if not wordy:
        table.padding = 0
    for i, row in enumerate(matrix[columns[0] :], columns[0] + 1):
        cells = row[columns[0] : columns[-1] + 1]
        table.add_row(f"{after} {i}", *(f"{value:.{decimals}f}" for value in cells))
    return table


def run_report(figures: Mapping[str, Any]) -> list[Table]:
    """All about one run: matrix, averages, costs, and why the accuracy is what it is.

    figures: of one seed, or of several as `run --json` prints them; then means (± std) over seeds are shown.
    """
    seeds: Sequence[Mapping[str, Any]] = figures.get("seeds", [figures])
    parts = []
    for seed in seeds:
        which = f", seed {seed['seed']}" if len(seeds) > 1 else ""
        parts += matrix_tables(seed["matrix"], f"Accuracy (%) after each task{which}")
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
        cells = (FIGURES[name].number(mean.get(name), std.get(name)) if name else "" for name in names)
        table.add_row(heading, *cells)
    return table


def _costs(mean: Mapping[str, float], std: Mapping[str, float]) -> Table:
    """What it took; figures that the method does not have are left out."""
    table = plain_table(None, "", *numbers([""]))
    table.show_header = False
    names = list(FIGURES)
    for name in names[names.index("calibration_error") :]:
        if name in mean:
            table.add_row(FIGURES[name].title, FIGURES[name].number(mean[name], std.get(name)))
    if "forward_passes" in mean and mean.get("naive_forward_passes"):
        ratio = mean["forward_passes"] / mean["naive_forward_passes"]
        table.add_row("Forward passes, made / naive", f"{ratio:.2f}")
    return table


def _diagnosis(seeds: Sequence[Mapping[str, Any]]) -> Table:
    """A line per task and their mean; of several seeds, means without deviations, which would not fit."""
    tasks = [(rows[0]["task"], rows) for rows in zip(*(seed["tasks"] for seed in seeds), strict=True)]
    rows = [*tasks, ("mean", [seed["mean"] for seed in seeds])]
    means = [(name, [over_seeds(values)[0]]) for name, values in rows]
    title = "Diagnosis after the last task (%; spread: mean cosine; passes: number)"
    table = spread_table(title, SHORT_DIAGNOSIS, means)
    table.rows[-2].end_section = True
    return table


def plain_table(title: str | None = None, *columns: Column | str) -> Table:
    """The look that all tables share: no lines but one below the headings."""
    heading = None if title is None else Text(title, style="bold")  # never markup
    look: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    return Table(*columns, title=heading, title_justify="left", **look)


def labels() -> Column:
    """The first column, which never gives way to the figures: they may take two lines, names stay whole."""
    return Column(style="bold", no_wrap=True)


def numbers(headings: Iterable[str], no_wrap: bool = False) -> list[Column]:
    return [Column(heading, justify="right", no_wrap=no_wrap) for heading in headings]


def label(name: str) -> Text:
    """A name in lines that fit; it may look like markup."""
    return Text("\n".join(textwrap.wrap(printable(name), LABEL_WIDTH)) or printable(name))
