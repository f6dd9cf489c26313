"""Runs side by side: mean and spread over seeds, for terminals, Markdown and spreadsheets.

Every function takes rows: a label and the figures of each of its seeds, as `run --json` names them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import Any

from rich.table import Table

from protosteer.report.tables import DIAGNOSIS, FIGURES, Figure, Row, had, spread_over_seeds, spread_table
from protosteer.util.text import without_control

Rows = Mapping[str, Sequence[Mapping[str, Any]]]

# Columns of the tables, headed in lines about as wide as the figures below.
QUALITY = {
    "last_accuracy": Figure("Last acc.\nmean over\ntasks"),
    "avg_accuracy": Figure("Avg acc.\nmean over\ntasks"),
    "last_image_accuracy": Figure("Last acc.\nmean over\nimages"),
    "avg_image_accuracy": Figure("Avg acc.\nmean over\nimages"),
    "last_forgetting": Figure("Forget-\nting"),
}
BLURRY = ("blurred_images", "anytime_accuracy", "last_image_accuracy")
DECIDING = ("calibration_error", "passes_per_image", "retrieval_accuracy")
COSTS = ("bytes_per_class", "trained_parameters", "train_seconds", "eval_seconds")
# The diagnosis, beside the other figures: how the images of a task ended, and why. A method has one kind.
CAUSES = {f"diagnosis_{name}": figure for name, figure in DIAGNOSIS.items()}
ENDED = "Test images after the last task, means over tasks"
KINDS = (
    (ENDED, ("accuracy", "not_retrieved", "wrong_prompt_won", "wrong_class")),
    (
        "True task given: accuracy; and spread (mean cosine)",
        ("true_task_with_prompt", "true_task_without_prompt", "key_spread", "value_spread"),
    ),
    (ENDED, ("accuracy", "task_not_tried", "coarse_wrong", "fine_wrong")),
    (
        "What evidence is worth, means over tasks",
        ("coarse_accuracy", "true_task_accuracy", "confidence", "passes"),
    ),
    (ENDED, ("accuracy", "same_task", "other_task")),
)


def comparison_tables(rows: Rows) -> list[Table]:
    """Narrow enough for a terminal: how good, at what cost, and why, for each kind of diagnosis."""
    flat = list(_flat(rows).items())
    counts = {len(seeds) for _, seeds in flat}
    alike = f"{min(counts)} seeds" if len(counts) == 1 else "seeds"  # no column where all have as many
    spread = ", 1 seed" if counts == {1} else f", mean ± std over {alike}"
    return [
        spread_table(
            f"Accuracy (%) and forgetting (points){spread}", QUALITY, flat, count_seeds=len(counts) > 1
        ),
        *_blurry(flat),
        spread_table("Decisions after the last task", _narrow(FIGURES, DECIDING), flat),
        spread_table("Cost", _narrow(FIGURES, COSTS), flat),
        *(table for title, names in KINDS for table in _causes(title, names, flat)),
    ]


def _blurry(rows: Sequence[Row]) -> list[Table]:
    """What is reported where classes come in several tasks; nothing if no row has such."""
    figures = _narrow(FIGURES, BLURRY)
    return [spread_table("Blurry task boundaries", figures, rows)] if BLURRY[0] in had(figures, rows) else []


def _causes(title: str, names: Sequence[str], rows: Sequence[Row]) -> list[Table]:
    """One kind of diagnosis of the rows that have it; nothing if none has."""
    figures = _narrow(CAUSES, [f"diagnosis_{name}" for name in names])
    telling = f"diagnosis_{names[1]}"  # the first may be of any kind, a spread may be unknown
    those = [row for row in rows if telling in had(figures, [row])]
    return [spread_table(title, figures, those)] if those else []


def _narrow(figures: Mapping[str, Figure], names: Sequence[str]) -> dict[str, Figure]:
    return {name: replace(figures[name], heading=fill(figures[name].title, 12)) for name in names}


def comparison_markdown(rows: Rows) -> str:
    """Two GitHub tables of the same figures."""
    flat = _flat(rows)
    blurry = had({name: FIGURES[name] for name in BLURRY[:2]}, flat.items())
    figures = {name: FIGURES[name] for name in (*QUALITY, *blurry, *DECIDING, *COSTS)}
    return f"{_markdown(flat, figures)}\n{_markdown(flat, had(CAUSES, flat.items()))}"


def comparison_csv(rows: Rows) -> str:
    """Plain numbers, every figure there is with its mean and deviation; empty where there is none."""
    spreads = {name: spread_over_seeds(seeds) for name, seeds in _flat(rows).items()}
    found = {name for mean, _ in spreads.values() for name in mean}
    known = [name for name in FIGURES if name in found]
    causes = [name for name in CAUSES if name in found]
    columns = [*known, *sorted(found.difference(known, causes)), *causes]

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", "seeds", *(f"{name}_{kind}" for name in columns for kind in ("mean", "std"))])
    for label, spread in spreads.items():
        cells = (format(kind[name], ".12g") if name in kind else "" for name in columns for kind in spread)
        writer.writerow([without_control(label), len(rows[label]), *cells])
    return file.getvalue()


def _flat(rows: Rows) -> Rows:
    return {label: [_with_diagnosis(seed) for seed in seeds] for label, seeds in rows.items()}


def _with_diagnosis(seed: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a seed with its diagnosis among them."""
    diagnosis = (seed.get("diagnosis") or {}).get("mean", {})
    return {**seed, **{f"diagnosis_{name}": value for name, value in diagnosis.items()}}


def _markdown(rows: Rows, figures: Mapping[str, Figure]) -> str:
    titles = (figure.title for figure in figures.values())
    lines = [["run", "seeds", *titles], ["---", *["---:"] * (1 + len(figures))]]
    for label, seeds in rows.items():
        mean, std = spread_over_seeds(seeds)
        cells = (figure.number(mean.get(name), std.get(name), " ± ") for name, figure in figures.items())
        lines.append(
            [without_control(label).replace("\\", "\\\\").replace("|", "\\|"), str(len(seeds)), *cells]
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
