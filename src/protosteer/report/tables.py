"""Figures and accuracy matrices as text, for terminals and pipes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protosteer.evaluation.metrics import Matrix, over_seeds

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
    "last_forgetting": Figure("Forgetting"),
    "avg_forgetting": Figure("Avg forgetting"),
    "retrieval_accuracy": Figure("Task retrieved", "%"),
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
USUAL = ("last_accuracy", "avg_accuracy", "last_forgetting", "prompts_per_image", "bytes_per_class")

# The diagnosis by the names of `evaluation.diagnosis`.
DIAGNOSIS = {
    "accuracy": Figure("Right", "%"),
    "not_retrieved": Figure("Task not retrieved", "%"),
    "wrong_prompt_won": Figure("Wrong prompt won", "%"),
    "wrong_class": Figure("Wrong class", "%"),
    "true_task_with_prompt": Figure("True task, with prompt", "%"),
    "true_task_without_prompt": Figure("True task, no prompt", "%"),
    "key_spread": Figure("Key spread", decimals=3),
    "value_spread": Figure("Value spread", decimals=3),
}


def figures_table(
    rows: Mapping[str, Mapping[str, float | None]],
    columns: Sequence[str] = USUAL,
    title: str | None = None,
) -> Table:
    """One line per run; `columns` are names of figures."""
    figures = {column: FIGURES[column] for column in columns}
    averages = {figure.average for figure in figures.values() if figure.average}
    table = plain_table(title)
    add_labels(table)
    for figure in figures.values():
        named = len(averages) > 1 and figure.average
        table.add_column(
            f"{figure.heading}, mean over {figure.average}" if named else figure.heading, justify="right"
        )
    for name, values in rows.items():
        table.add_row(label(name), *(figure.text(values.get(key)) for key, figure in figures.items()))
    return table


def matrix_table(matrix: Matrix, title: str | None = None) -> Table:
    """Row i: accuracy in percent on each task's test images when task i had just been learned."""
    tasks = len(matrix)
    if tasks <= MOST_TASKS:
        return _matrix_part(matrix, title, range(tasks))
    shares = [range(tasks)[first : first + MOST_TASKS] for first in range(0, tasks, MOST_TASKS)]
    return stack(*(_matrix_part(matrix, None if share[0] else title, share) for share in shares))


def _matrix_part(matrix: Matrix, title: str | None, columns: range) -> Table:
    wordy, decimals = len(matrix) <= WORDY_TASKS, int(len(matrix) <= DECIMAL_TASKS)
    table = plain_table(title)
    if not wordy:
        table.padding = 0
    table.add_column("", no_wrap=True)
    for j in columns:
        table.add_column(f"on task {j + 1}" if wordy else f"{j + 1}", justify="right", no_wrap=not wordy)
    for i, row in enumerate(matrix[columns[0] :], columns[0]):
        cells = row[columns[0] : columns[-1] + 1]
        table.add_row(
            f"after task {i + 1}" if wordy else f"after {i + 1}", *(f"{v:.{decimals}f}" for v in cells)
        )
    return table


def run_report(figures: Mapping[str, Any]) -> list[RenderableType]:
    """All about one run: matrix, averages, costs, and why the accuracy is what it is.

    figures: of one seed, or of several as `run --json` prints them; then means (± std) over seeds are shown.
    """
    seeds: Sequence[Mapping[str, Any]] = figures.get("seeds", [figures])
    title = "Accuracy (%) after each task"
    parts: list[RenderableType] = [
        matrix_table(seed["matrix"], f"{title}, seed {seed['seed']}" if len(seeds) > 1 else title)
        for seed in seeds
    ]
    if all(seed.get("after_each_task") for seed in seeds):
        parts.append(_moments([seed["after_each_task"] for seed in seeds]))
    mean, std = spread_over_seeds(seeds)
    parts += [_averages(mean, std), _costs(mean, std)]
    if all(seed.get("diagnosis") for seed in seeds):
        parts.append(_diagnosis([seed["diagnosis"] for seed in seeds]))
    return parts


def spread_over_seeds(seeds: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean and sample standard deviation of the figures that all seeds have; one seed has no deviation."""
    mean, std = over_seeds(seeds)
    return mean, std if len(seeds) > 1 else {}


def _moments(seeds: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """What was measured after each task, beside the matrix."""
    table = plain_table()
    table.add_column("", no_wrap=True)
    columns = {
        "accuracy_over_tasks": Figure("Acc. (%), mean over tasks"),
        "accuracy_over_images": Figure("Acc. (%), mean over images"),
        "forgetting": FIGURES["last_forgetting"],
        "retrieval_accuracy": Figure("Task retrieved (%)"),
        "prompts_per_image": FIGURES["prompts_per_image"],
    }
    for figure in columns.values():
        table.add_column(textwrap.fill(figure.heading, 12), justify="right")
    for i, moment in enumerate(zip(*seeds, strict=True), 1):
        mean, std = spread_over_seeds(moment)
        cells = (figure.number(mean.get(name), std.get(name)) for name, figure in columns.items())
        table.add_row(f"after {i}", *cells)
    return table


def _averages(mean: Mapping[str, float], std: Mapping[str, float]) -> Table:
    table = plain_table()
    for heading in ("", "mean over tasks", "mean over images"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = (
        ("Last accuracy (%)", "last_accuracy", "last_image_accuracy"),
        ("Avg accuracy (%)", "avg_accuracy", "avg_image_accuracy"),
        ("Last forgetting (points)", "last_forgetting"),
        ("Avg forgetting (points)", "avg_forgetting"),
    )
    for heading, *names in rows:
        table.add_row(heading, *(FIGURES[name].number(mean.get(name), std.get(name)) for name in names))
    return table


def _costs(mean: Mapping[str, float], std: Mapping[str, float]) -> Table:
    """What it took; figures that the method does not have are left out."""
    table = plain_table()
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    names = list(FIGURES)
    for name in names[names.index("retrieval_accuracy") :]:
        if name in mean:
            table.add_row(FIGURES[name].title, FIGURES[name].number(mean[name], std.get(name)))
    if "forward_passes" in mean and mean.get("naive_forward_passes"):
        ratio = mean["forward_passes"] / mean["naive_forward_passes"]
        table.add_row("Forward passes, made / naive", f"{ratio:.2f}")
    return table


def _diagnosis(seeds: Sequence[Mapping[str, Any]]) -> Table:
    """A line per task and their mean; of several seeds, means without deviations, which would not fit."""
    table = plain_table("Diagnosis after the last task (%; spread: mean cosine)")
    add_labels(table)
    figures = {name: _short(figure) for name, figure in DIAGNOSIS.items()}
    for figure in figures.values():
        table.add_column(figure.heading.replace(" ", "\n"), justify="right")
    tasks = [(rows[0]["task"], rows) for rows in zip(*(seed["tasks"] for seed in seeds), strict=True)]
    for name, rows in [*tasks, ("mean", [seed["mean"] for seed in seeds])]:
        mean, _ = spread_over_seeds(rows)
        cells = (figure.number(mean.get(key)) for key, figure in figures.items())
        table.add_row(label(name), *cells, end_section=name == tasks[-1][0])
    return table


def _short(figure: Figure) -> Figure:
    """A task has few test images: the second decimal of a percentage says nothing."""
    return replace(figure, decimals=1) if figure.unit == "%" else figure


def plain_table(title: str | None = None) -> Table:
    """The look that all tables share: no lines but one below the headings."""
    heading = None if title is None else Text(title, style="bold")  # never markup
    return Table(title=heading, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def stack(*tables: Table) -> Table:
    """Tables one below the other."""
    grid = Table.grid()
    for table in tables:
        grid.add_row(table)
    return grid


def add_labels(table: Table) -> None:
    """The first column, which never gives way to the figures: they may take two lines, names stay whole."""
    table.add_column("", style="bold", no_wrap=True)


def label(name: str) -> Text:
    """A name in lines that fit; it may look like markup."""
    return Text("\n".join(textwrap.wrap(name, LABEL_WIDTH)) or name)
