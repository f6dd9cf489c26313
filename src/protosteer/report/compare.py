"""Runs side by side: mean and spread over seeds, for terminals, Markdown and spreadsheets.

Every function takes rows: a label and the figures of each of its seeds, as `run --json` names them.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from protosteer.report.tables import (
    DIAGNOSIS,
    FIGURES,
    Figure,
    add_labels,
    label,
    plain_table,
    spread_over_seeds,
    stack,
)

Rows = Mapping[str, Sequence[Mapping[str, Any]]]

QUALITY = ("last_accuracy", "avg_accuracy", "last_image_accuracy", "avg_image_accuracy", "last_forgetting")
COST = ("retrieval_accuracy", "prompts_per_image", "bytes_per_class", "train_seconds", "eval_seconds")
BINS = ("accuracy", "not_retrieved", "wrong_prompt_won", "wrong_class")
CAUSES = ("true_task_with_prompt", "true_task_without_prompt", "key_spread", "value_spread")
HEADING_WIDTH = 12
_BREAKS = {"last_forgetting": "Forget-\nting"}  # the one heading whose word is wider than its figures


@dataclass(frozen=True)
class Compared:
    """One row: means and sample standard deviations over its seeds; `std` is empty for a single seed."""

    label: str
    seeds: int
    mean: dict[str, float]
    std: dict[str, float]

    def cell(self, name: str, figure: Figure, sign: str) -> str:
        return figure.number(self.mean.get(name), self.std.get(name), sign)


def compare_rows(rows: Rows) -> list[Compared]:
    """The figures of every row over its seeds; those that a seed lacks are left out."""
    return [Compared(name, len(seeds), *spread_over_seeds(seeds)) for name, seeds in rows.items()]


def compare_diagnoses(rows: Rows) -> list[Compared]:
    """The same for the diagnosis; a row one of whose seeds has none is left with no figures."""
    return compare_rows(
        {
            name: [(seed.get("diagnosis") or {}).get("mean", {}) for seed in seeds]
            for name, seeds in rows.items()
        }
    )


def comparison_table(rows: Rows) -> Table:
    """Two tables, one below the other, so that both fit on a terminal: how good, and at what cost."""
    compared = compare_rows(rows)
    return stack(
        _part(
            compared, _figures(QUALITY), "Accuracy (%) and forgetting (points), mean ± std over seeds", True
        ),
        _part(compared, _figures(COST), "Retrieval and cost"),
    )


def diagnosis_table(rows: Rows) -> Table:
    """Why the rows have the accuracy that they have."""
    compared = compare_diagnoses(rows)
    bins = "Test images after the last task (%), means over tasks"
    causes = "True task given: accuracy (%); and spread (mean cosine)"
    return stack(
        _part(compared, {name: DIAGNOSIS[name] for name in BINS}, bins),
        _part(compared, {name: DIAGNOSIS[name] for name in CAUSES}, causes),
    )


def comparison_markdown(rows: Rows) -> str:
    """One GitHub table of the same figures."""
    return _markdown(compare_rows(rows), _figures(QUALITY + COST))


def diagnosis_markdown(rows: Rows) -> str:
    return _markdown(compare_diagnoses(rows), DIAGNOSIS)


def comparison_csv(rows: Rows) -> str:
    """Plain numbers, every figure there is with its mean and deviation; empty where there is none."""
    pairs = list(zip(compare_rows(rows), compare_diagnoses(rows), strict=True))
    found = {name for row, _ in pairs for name in row.mean}
    names = [name for name in FIGURES if name in found] + sorted(found - set(FIGURES))
    causes = [name for name in DIAGNOSIS if any(name in row.mean for _, row in pairs)]
    columns = [(0, name, name) for name in names] + [(1, name, f"diagnosis_{name}") for name in causes]

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", "seeds"] + [f"{head}_{kind}" for *_, head in columns for kind in ("mean", "std")])
    for pair in pairs:
        cells = [_plain(values.get(name)) for k, name, _ in columns for values in (pair[k].mean, pair[k].std)]
        writer.writerow([pair[0].label, pair[0].seeds, *cells])
    return file.getvalue()


def _figures(names: Sequence[str]) -> dict[str, Figure]:
    return {name: FIGURES[name] for name in names}


def _part(rows: Sequence[Compared], figures: Mapping[str, Figure], title: str, seeds: bool = False) -> Table:
    table = plain_table(title)
    add_labels(table)
    if seeds:
        table.add_column("Seeds", justify="right", no_wrap=True)
    for name, figure in figures.items():
        table.add_column(_heading(name, figure), justify="right")
    for row in rows:
        # Where room is short the cell breaks before the sign, so that it stays with its deviation.
        cells = (row.cell(name, figure, " ±") for name, figure in figures.items())
        table.add_row(label(row.label), *([str(row.seeds)] if seeds else []), *cells)
    return table


def _heading(name: str, figure: Figure) -> str:
    """In lines about as wide as the figures below."""
    if figure.average:
        return f"{figure.heading.split()[0]} acc.\nmean over\n{figure.average}"
    return _BREAKS.get(name) or textwrap.fill(figure.title if name in COST else figure.heading, HEADING_WIDTH)


def _markdown(rows: Sequence[Compared], figures: Mapping[str, Figure]) -> str:
    lines = [
        ["run", "seeds", *(figure.title for figure in figures.values())],
        ["---", *["---:"] * (1 + len(figures))],
    ]
    for row in rows:
        name = row.label.replace("\\", "\\\\").replace("|", "\\|")
        cells = (row.cell(name, figure, " ± ") for name, figure in figures.items())
        lines.append([name, str(row.seeds), *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _plain(value: float | None) -> str:
    return "" if value is None else format(value, ".12g")
