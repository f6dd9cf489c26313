"""Figures and accuracy matrices as text, for terminals and pipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from protosteer.evaluation.metrics import Matrix


def _percent(value: float) -> str:
    return f"{value:.2f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


# Heading and format of the figures that a table may show, by the names that every command uses.
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "last_accuracy": ("Last accuracy", _percent),
    "avg_accuracy": ("Avg accuracy", _percent),
    "last_forgetting": ("Forgetting", "{:.2f}".format),
    "avg_forgetting": ("Avg forgetting", "{:.2f}".format),
    "retrieval_accuracy": ("Task retrieved", _percent),
    "prompts_per_image": ("Prompts per image", "{:.2f}".format),
    "bytes_per_task": ("Bytes per task", _count),
    "bytes_per_class": ("Bytes per class", _count),
    "train_seconds": ("Learning", "{:.1f} s".format),
    "eval_seconds": ("Testing", "{:.1f} s".format),
}
USUAL = ("last_accuracy", "avg_accuracy", "last_forgetting", "prompts_per_image", "bytes_per_class")


def figures_table(
    rows: Mapping[str, Mapping[str, float]], columns: Sequence[str] = USUAL, title: str | None = None
) -> Table:
    """One line per run; `columns` are names of figures."""
    table = plain_table(title)
    table.add_column("", style="bold", no_wrap=True)
    for column in columns:
        table.add_column(COLUMNS[column][0], justify="right")
    for name, figures in rows.items():
        table.add_row(name, *(COLUMNS[column][1](figures[column]) for column in columns))
    return table


def matrix_table(matrix: Matrix, title: str | None = None) -> Table:
    """Row i: accuracy in percent on each task's test images when task i had just been learned."""
    table = plain_table(title)
    table.add_column("", no_wrap=True)
    for j in range(len(matrix)):
        table.add_column(f"on task {j + 1}", justify="right")
    for i, row in enumerate(matrix):
        table.add_row(f"after task {i + 1}", *(f"{value:.1f}" for value in row))
    return table


def plain_table(title: str | None = None) -> Table:
    """The look that all tables share: no lines but one below the headings."""
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
