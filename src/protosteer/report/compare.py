"""Compare runs by mean and standard deviation over class orders and seeds, for terminals, papers and spreadsheets.

Every function takes rows: a label and the metrics of each of its runs, as `run --json` names them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import Any

from rich.table import Table

from protosteer.report.tables import DIAGNOSIS, METRICS, Metric, Row, present, spread_over_seeds, spread_table
from protosteer.util.text import counted, without_control

Rows = Mapping[str, Sequence[Mapping[str, Any]]]

# Columns of the tables, with headings about as wide as their cells.
QUALITY = {
    "last_accuracy": Metric("Last acc.\nmean over\ntasks"),
    "avg_accuracy": Metric("Avg acc.\nmean over\ntasks"),
    "last_image_accuracy": Metric("Last acc.\nmean over\nimages"),
    "avg_image_accuracy": Metric("Avg acc.\nmean over\nimages"),
    "last_forgetting": Metric("Forget-\nting"),
}
BLURRY = ("blurred_images", "anytime_accuracy", "last_image_accuracy")
DECIDING = ("calibration_error", "passes_per_image", "retrieval_accuracy")
COSTS = ("bytes_per_class", "trained_parameters", "train_seconds", "eval_seconds")
# The diagnosis next to the other metrics; each method has one kind.
CAUSES = {f"diagnosis_{name}": metric for name, metric in DIAGNOSIS.items()}
ENDED = "Test images after the last task, means over tasks"
KINDS = (
    (ENDED, ("accuracy", "not_retrieved", "wrong_prompt_won", "wrong_class")),
    (
        "True task given: accuracy; and spread (mean cosine)",
        ("true_task_with_prompt", "true_task_without_prompt", "key_spread", "value_spread"),
    ),
    (ENDED, ("accuracy", "task_not_tried", "coarse_wrong", "fine_wrong")),
    ("What evidence is worth, means over tasks", ("coarse_accuracy", "true_task_accuracy", "confidence", "passes")),
    (ENDED, ("accuracy", "same_task", "other_task")),
)


def comparison_tables(rows: Rows) -> list[Table]:
    """Make tables that fit a terminal: quality, cost, and each kind of diagnosis."""
    flat = list(_flat(rows).items())
    repeats = {_repeats(runs) for _, runs in flat}
    over = min(repeats) if len(repeats) == 1 else "n runs"
    spread = ", 1 seed" if repeats == {"1 seed"} else f", mean ± std over {over}"
    title = f"Accuracy (%) and forgetting (points){spread}"
    return [
        spread_table(title, QUALITY, flat, count_runs=len(repeats) > 1),
        *_blurry(flat),
        spread_table("Decisions after the last task", _narrow(METRICS, DECIDING), flat),
        spread_table("Cost", _narrow(METRICS, COSTS), flat),
        *(table for title, names in KINDS for table in _causes(title, names, flat)),
    ]


def _repeats(runs: Sequence[Mapping[str, Any]]) -> str:
    """Describe how many runs a row averages over, such as "6 runs (3 class orders, 2 seeds)"."""
    orders, seeds = (len({run.get(name) for run in runs}) for name in ("class_order", "seed"))
    if orders == 1:
        return counted(len(runs), "seed")
    return f"{len(runs)} runs ({orders} class orders, {counted(seeds, 'seed')})"


def _blurry(rows: Sequence[Row]) -> list[Table]:
    """Show metrics of blurry task boundaries, if a row has them."""
    metrics = _narrow(METRICS, BLURRY)
    return [spread_table("Blurry task boundaries", metrics, rows)] if BLURRY[0] in present(metrics, rows) else []


def _causes(title: str, names: Sequence[str], rows: Sequence[Row]) -> list[Table]:
    """Show one kind of diagnosis for the rows that have it."""
    metrics = _narrow(CAUSES, [f"diagnosis_{name}" for name in names])
    key = f"diagnosis_{names[1]}"  # the first is common to all kinds, and a spread may be unknown
    matching = [row for row in rows if key in present(metrics, [row])]
    return [spread_table(title, metrics, matching)] if matching else []


def _narrow(metrics: Mapping[str, Metric], names: Sequence[str]) -> dict[str, Metric]:
    return {name: replace(metrics[name], heading=fill(metrics[name].title, 12)) for name in names}


def comparison_markdown(rows: Rows) -> str:
    """Make two GitHub tables of the same metrics."""
    flat = _flat(rows)
    blurry = present({name: METRICS[name] for name in BLURRY[:2]}, flat.items())
    metrics = {name: METRICS[name] for name in (*QUALITY, *blurry, *DECIDING, *COSTS)}
    return f"{_markdown(flat, metrics)}\n{_markdown(flat, present(CAUSES, flat.items()))}"


def comparison_csv(rows: Rows) -> str:
    """Make a CSV table of mean and deviation of every metric; cells without a value are empty."""
    spreads = {name: spread_over_seeds(seeds) for name, seeds in _flat(rows).items()}
    names = {name for mean, _ in spreads.values() for name in mean}
    known = [name for name in METRICS if name in names]
    causes = [name for name in CAUSES if name in names]
    columns = [*known, *sorted(names.difference(known, causes)), *causes]

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    repeats = ["n", "class_orders", "seeds"]
    writer.writerow(["run", *repeats, *(f"{name}_{kind}" for name in columns for kind in ("mean", "std"))])
    for label, spread in spreads.items():
        cells = (format(kind[name], ".12g") if name in kind else "" for name in columns for kind in spread)
        runs = rows[label]
        distinct = [len({run.get(name) for run in runs}) for name in ("class_order", "seed")]
        writer.writerow([without_control(label), len(runs), *distinct, *cells])
    return file.getvalue()


def _flat(rows: Rows) -> Rows:
    return {label: [_with_diagnosis(seed) for seed in seeds] for label, seeds in rows.items()}


def _with_diagnosis(seed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a seed with its diagnosis among them."""
    diagnosis = (seed.get("diagnosis") or {}).get("mean", {})
    return {**seed, **{f"diagnosis_{name}": value for name, value in diagnosis.items()}}


def _markdown(rows: Rows, metrics: Mapping[str, Metric]) -> str:
    titles = (metric.title for metric in metrics.values())
    lines = [["run", "n", *titles], ["---", *["---:"] * (1 + len(metrics))]]
    for label, seeds in rows.items():
        mean, std = spread_over_seeds(seeds)
        cells = (metric.number(mean.get(name), std.get(name), " ± ") for name, metric in metrics.items())
        lines.append([without_control(label).replace("\\", "\\\\").replace("|", "\\|"), str(len(seeds)), *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
