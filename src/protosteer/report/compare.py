"""Compare runs by mean and standard deviation over class orders and seeds, for terminals, papers and spreadsheets.

Every function takes rows: a label and the metrics of each of its runs, as `run --json` names them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import Any

from rich.table import Table

from protosteer.report.tables import (
    DIAGNOSIS,
    METRICS,
    NOTHING,
    Metric,
    Row,
    labels,
    numbers,
    plain_table,
    present,
    spread_over_seeds,
    spread_table,
)
from protosteer.report.tables import label as label_cell
from protosteer.util.text import counted, without_control

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
Tests = Mapping[str, Mapping[str, Any]]  # by label, as `significance.compare_with_first` returns them

TEST_COLUMNS = (
    "run", "Last acc. (%) [95 %]", "Difference [95 %]", "Pairs", "McNemar p", "Holm p", "t-test p", "Wilcoxon p",
)  # fmt: skip

# Columns of the tables, with headings about as wide as their cells.
QUALITY = {
    "last_accuracy": Metric("Last acc.\nmean over\ntasks"),
    "avg_accuracy": Metric("Avg acc.\nmean over\ntasks"),
    "last_image_accuracy": Metric("Last acc.\nmean over\nimages"),
    "avg_image_accuracy": Metric("Avg acc.\nmean over\nimages"),
    "last_forgetting": Metric("Forget-\nting"),
}
BLURRY = ("blurred_images", "anytime_accuracy", "last_image_accuracy")
TRANSFER = (
    "avg_forgetting", "clipped_forgetting", "backward_transfer", "forward_transfer", "task_incremental_accuracy",
)  # fmt: skip
DECISION = ("calibration_error", "passes_per_image", "retrieval_accuracy")
COSTS = ("bytes_per_class", "trained_parameters", "train_seconds", "eval_seconds")
PAPER_BYTES = ("prompt_bytes_per_task", "appendix_bytes_per_class")  # as CPP's paper counts memory
# By title of a LaTeX table. No table is wider than a page.
LATEX = {
    "Accuracy (%) and forgetting (points)": tuple(QUALITY),
    "Blurry task boundaries": BLURRY[:2],
    "Forgetting and transfer (points), task-incremental accuracy (%)": TRANSFER,
    "Decisions after the last task": DECISION,
    "Cost": (*COSTS, *PAPER_BYTES),
}
# The diagnosis next to the other metrics; each method has one kind.
CAUSES = {f"diagnosis_{name}": metric for name, metric in DIAGNOSIS.items()}
AFTER_LAST = "Test images after the last task, means over tasks"
KINDS = (
    (AFTER_LAST, ("accuracy", "not_retrieved", "wrong_prompt_won", "wrong_class")),
    (
        "True task given: accuracy; and spread (mean cosine)",
        ("true_task_with_prompt", "true_task_without_prompt", "key_spread", "value_spread"),
    ),
    (AFTER_LAST, ("accuracy", "task_not_tried", "coarse_wrong", "fine_wrong")),
    ("What each score is worth, means over tasks", ("coarse_accuracy", "true_task_accuracy", "confidence", "passes")),
    (AFTER_LAST, ("accuracy", "same_task", "other_task")),
)


def comparison_tables(rows: Rows) -> list[Table]:
    """Make tables that fit a terminal: quality, cost, and each kind of diagnosis."""
    flat = list(_add_diagnoses(rows).items())
    repeats = {_repeats(runs) for _, runs in flat}
    runs_text = min(repeats) if len(repeats) == 1 else "n runs"
    spread = ", 1 seed" if repeats == {"1 seed"} else f", mean ± std over {runs_text}"
    title = f"Accuracy (%) and forgetting (points){spread}"
    return [
        spread_table(title, QUALITY, flat, count_runs=len(repeats) > 1),
        *_tabulate_optional("Blurry task boundaries", BLURRY, BLURRY[:1], flat),
        *_tabulate_optional(
            "Forgetting and transfer (points), task-incremental accuracy", TRANSFER, TRANSFER[1:], flat
        ),
        spread_table("Decisions after the last task", _wrap_headings(METRICS, DECISION), flat),
        spread_table("Cost", _wrap_headings(METRICS, (*COSTS, *PAPER_BYTES)), flat),
        *(table for title, names in KINDS for table in _tabulate_causes(title, names, flat)),
    ]


def _repeats(runs: Sequence[Mapping[str, Any]]) -> str:
    """Describe the number of runs of a row, such as "6 runs (3 class orders, 2 seeds)"."""
    orders, seeds = (len({run.get(name) for run in runs}) for name in ("class_order", "seed"))
    if orders == 1:
        return counted(len(runs), "seed")
    return f"{len(runs)} runs ({orders} class orders, {counted(seeds, 'seed')})"


def _tabulate_optional(title: str, names: Sequence[str], decisive: Sequence[str], rows: Sequence[Row]) -> list[Table]:
    """Return a table of metrics, in a list that is empty if no row has one of the decisive metrics."""
    has_one = bool(present(_select_metrics(decisive), rows))
    return [spread_table(title, _wrap_headings(METRICS, names), rows)] if has_one else []


def _tabulate_causes(title: str, names: Sequence[str], rows: Sequence[Row]) -> list[Table]:
    """Return a table of one kind of diagnosis, in a list that is empty if no row has it."""
    metrics = _wrap_headings(CAUSES, [f"diagnosis_{name}" for name in names])
    key = f"diagnosis_{names[1]}"  # the first is common to all kinds, and a spread may be unknown
    diagnosed_rows = [row for row in rows if key in present(metrics, [row])]
    return [spread_table(title, metrics, diagnosed_rows)] if diagnosed_rows else []


def _select_metrics(names: Iterable[str]) -> dict[str, Metric]:
    return {name: METRICS[name] for name in names}


def _wrap_headings(metrics: Mapping[str, Metric], names: Sequence[str]) -> dict[str, Metric]:
    return {name: replace(metrics[name], heading=fill(metrics[name].title, 12)) for name in names}


def comparison_markdown(rows: Rows, tests: Tests | None = None) -> str:
    """Make two GitHub tables of the same metrics, and one of the tests."""
    flat = _add_diagnoses(rows)
    groups = (TRANSFER[1:], BLURRY[:2], PAPER_BYTES)
    transfer, blurry, paper = (present(_select_metrics(names), flat.items()) for names in groups)
    metrics = _select_metrics((*QUALITY, *transfer, *blurry, *DECISION, *COSTS, *paper))
    parts = [_cells(flat, metrics), _cells(flat, present(CAUSES, flat.items()))]
    return "\n".join(map(github_table, parts + ([test_cells(tests)] if tests else [])))


def comparison_latex(rows: Rows, tests: Tests | None = None) -> str:
    """Make LaTeX tables (package booktabs) that fit a page, each after a comment with its title; the last has the tests."""
    flat = _add_diagnoses(rows)
    over = "; ".join(f"{without_control(name)}: {_repeats(runs)}" for name, runs in flat.items())
    parts = [f"% Mean and standard deviation over {over}\n"]
    for title, names in LATEX.items():
        metrics = present({name: METRICS[name] for name in names}, flat.items())
        if metrics and (names[0] != BLURRY[0] or BLURRY[0] in metrics):
            heading, *lines = _cells(flat, metrics)
            parts.append(f"% {title}\n{tabular([[fill(cell, 16) for cell in heading], *lines])}")
    if tests:
        parts.append(f"% {test_title(tests)}\n{tabular(test_cells(tests))}")
    return "\n".join(parts)


def tabular(lines: Sequence[Sequence[str]]) -> str:
    """Make a LaTeX table (package booktabs) of a heading and further lines of plain text."""
    heading, *body_lines = [" & ".join(map(_escape_latex, line)) + r" \\" for line in lines]
    columns = "l" + "r" * (len(lines[0]) - 1)
    body = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", heading, r"\midrule", *body_lines, r"\bottomrule"]
    return "\n".join([*body, r"\end{tabular}", ""])


def _escape_latex(text: str) -> str:
    if "\n" in text:  # a heading of several lines
        return r"\shortstack[r]{" + r"\\".join(map(_escape_latex, text.splitlines())) + "}"
    escaped = without_control(text).translate(_LATEX)
    return escaped.replace(" ± ", r" $\pm$ ").replace("−", "$-$").replace(NOTHING, "--")


_LATEX = str.maketrans({
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
})  # fmt: skip


def comparison_tests(tests: Tests) -> Table:
    """Make a table of confidence intervals, and of tests against the first row."""
    table = plain_table(test_title(tests), labels(), *numbers(TEST_COLUMNS[1:]))
    for name, *cells in test_cells(tests)[1:]:
        table.add_row(label_cell(name), *cells)
    if any(test.get("pairs") == 0 for test in tests.values()):
        table.caption = "Pairs 0: no run has the class order, seed and test images of one of the first row"
    return table


def test_title(tests: Tests) -> str:
    """Return the title of the table of tests, which names the first row."""
    first = without_control(next(iter(tests)))
    return f"Last accuracy (%), mean over images, 95 % bootstrap interval; difference from {first} (points)"


def test_cells(tests: Tests) -> list[list[str]]:
    """Return the headings and, for each row, its interval, its difference from the first row, and p-values."""
    lines = [list(TEST_COLUMNS)]
    for name, test in tests.items():
        spans = [_span(test, "accuracy"), _span(test, "difference")]
        p_values = (test.get(key) for key in ("mcnemar_p", "mcnemar_holm_p", "t_p", "wilcoxon_p"))
        pairs = str(test["pairs"]) if "pairs" in test else NOTHING
        lines.append([name, *spans, pairs, *(NOTHING if p is None else f"{p:.3g}" for p in p_values)])
    return lines


def _span(test: Mapping[str, Any], name: str) -> str:
    if name not in test:
        return NOTHING
    return f"{test[name]:.2f} [{test[f'{name}_low']:.2f}, {test[f'{name}_high']:.2f}]"


def comparison_csv(rows: Rows, tests: Tests | None = None) -> str:
    """Make a CSV table of mean and deviation of every metric, and of the tests; cells without a value are empty."""
    tests, spreads = tests or {}, {name: spread_over_seeds(seeds) for name, seeds in _add_diagnoses(rows).items()}
    names = {name for mean, _ in spreads.values() for name in mean}
    metric_names = [name for name in METRICS if name in names]
    causes = [name for name in CAUSES if name in names]
    columns = [*metric_names, *sorted(names.difference(metric_names, causes)), *causes]

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    repeats = ["n", "class_orders", "seeds"]
    test_names = list(dict.fromkeys(name for test in tests.values() for name in test))
    means = (f"{name}_{kind}" for name in columns for kind in ("mean", "std"))
    writer.writerow(["run", *repeats, *means, *(f"test_{name}" for name in test_names)])
    for label, spread in spreads.items():
        cells = (format(kind[name], ".12g") if name in kind else "" for name in columns for kind in spread)
        runs = rows[label]
        distinct = [len({run.get(name) for run in runs}) for name in ("class_order", "seed")]
        values = [tests.get(label, {}).get(name) for name in test_names]
        outcomes = ("" if value is None else format(value, ".12g") for value in values)
        writer.writerow([without_control(label), len(runs), *distinct, *cells, *outcomes])
    return file.getvalue()


def _add_diagnoses(rows: Rows) -> Rows:
    return {label: [_add_diagnosis(seed) for seed in seeds] for label, seeds in rows.items()}


def _add_diagnosis(seed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a seed with its diagnosis among them."""
    diagnosis = (seed.get("diagnosis") or {}).get("mean", {})
    return {**seed, **{f"diagnosis_{name}": value for name, value in diagnosis.items()}}


def _cells(rows: Rows, metrics: Mapping[str, Metric]) -> list[list[str]]:
    """Return the headings and, for each row, its label, the number of its runs, and the metrics."""
    lines = [["run", "n", *(metric.title for metric in metrics.values())]]
    for name, runs in rows.items():
        mean, std = spread_over_seeds(runs)
        cells = (metric.number(mean.get(key), std.get(key), " ± ") for key, metric in metrics.items())
        lines.append([name, str(len(runs)), *cells])
    return lines


def github_table(lines: Sequence[Sequence[str]]) -> str:
    """Make a GitHub table of a heading and further lines; the first column has labels."""
    heading, *body = ([_escape_label(line[0]), *line[1:]] for line in lines)
    table = [heading, ["---", *["---:"] * (len(heading) - 1)], *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def _escape_label(label: str) -> str:
    """Escape a label for a Markdown table."""
    return without_control(label).replace("\\", "\\\\").replace("|", "\\|")
