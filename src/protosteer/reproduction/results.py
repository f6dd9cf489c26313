"""The result of an experiment: our numbers beside the paper's, as Markdown, CSV, LaTeX and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from protosteer.report.compare import github_table, tabular
from protosteer.report.tables import NOTHING
from protosteer.reproduction.definition import Definition, Line, Scale
from protosteer.reproduction.grid import Cell

PAPER_NUMBERS = "ours ± standard deviation (the paper's, ours minus the paper's)"
MEGABYTE = 2**20  # the paper's 0.035 MB are 12 x 768 numbers of 4 bytes
CSV_COLUMNS = (
    "row", "column", "metric", "mean", "std", "n", "paper", "paper_std", "difference", "run",
)  # fmt: skip

# By row and column: what `run --json` prints.
MetricsByCell = Mapping[tuple[str, str], Mapping[str, Any]]


@dataclass(frozen=True)
class Number:
    """One metric of one cell; None stands for what is not known.

    Attributes:
        row: The key of its row.
        column: The key of its column.
        metric: The name of its metric.
        mean: Ours, over `n` runs.
        std: The sample standard deviation of ours.
        n: The number of runs.
        paper: The paper's.
        paper_std: The standard deviation of the paper's.
        run: The name of the run folder.
    """

    row: str
    column: str
    metric: str
    mean: float | None = None
    std: float | None = None
    n: int = 0
    paper: float | None = None
    paper_std: float | None = None
    run: str = ""

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Result:
    """An experiment with its numbers.

    Attributes:
        definition: The experiment at the scale.
        scale: The scale.
        numbers: By row, column and metric.
        missing: Why cells have no number, by their titles.
        notes: The settings that were chosen for cells.
        curves: By row and column: the accuracy matrix of each seed.
        pictures: Further plots, by file name.
    """

    definition: Definition
    scale: Scale
    numbers: Mapping[tuple[str, str, str], Number]
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    curves: Mapping[tuple[str, str], Sequence[Any]] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)

    def number(self, row: Line, column: Line, metric: str) -> Number:
        """Return the number of a cell; an empty one where neither ours nor the paper's is known."""
        return self.numbers.get((row.key, column.key, metric)) or Number(row.key, column.key, metric)

    def rows(self) -> list[Line]:
        """Return the rows that have a number, ours or the paper's."""
        return [row for row in self.definition.rows if any(n.row == row.key for n in self.numbers.values())]


def collect(
    definition: Definition, scale: Scale, cells: Sequence[Cell], cell_metrics: MetricsByCell, reasons: Mapping[str, str]
) -> Result:
    """Collect the numbers of an experiment from the metrics of its runs."""
    runs = {(cell.row.key, cell.column.key): cell.run.folder.name for cell in cells if cell.run}
    numbers = {}
    for row in definition.rows:
        for column in definition.columns:
            key = (row.key, column.key)
            for metric in definition.metrics:
                values = _read_values(metric, key, cell_metrics)
                known_values = [value for value in values if value is not None]
                is_complete = 0 < len(known_values) == len(values)
                mean, std = mean_and_std(known_values) if is_complete else (None, None)
                paper, paper_std = definition.paper_value(*key, metric)
                run = runs.get(key, "") if mean is not None else ""
                if mean is not None or paper is not None:
                    number = Number(*key, metric, mean, std, len(known_values), paper, paper_std, run)
                    numbers[(*key, metric)] = number
    curves = {key: [seed["matrix"] for seed in values["seeds"]] for key, values in cell_metrics.items()}
    return Result(definition, scale, numbers, reasons, curves=curves)


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Compute mean and sample standard deviation; one value has no deviation."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def _read_values(metric: str, key: tuple[str, str], metrics: MetricsByCell) -> list[float | None]:
    """Return a metric of each seed of a cell."""
    if key not in metrics:
        return []
    seeds = metrics[key]["seeds"]
    if metric in DERIVED:
        return [DERIVED[metric](seed, key, metrics) for seed in seeds]
    return [seed.get(metric) for seed in seeds]


def _paper_bytes(seed: Mapping[str, Any]) -> float:
    """Return a task's bytes as the method's paper counts them, or else all that it added to the state."""
    return float(seed.get("prompt_bytes_per_task", seed["bytes_per_task"]))


def _gap(seed: Mapping[str, Any], key: tuple[str, str], metrics: MetricsByCell) -> float | None:
    """Compute how far the accuracy is below joint training on the same seed."""
    joint_seeds = metrics.get(("joint", key[1]), {"seeds": []})["seeds"]
    accuracy = next((joint["last_accuracy"] for joint in joint_seeds if joint["seed"] == seed["seed"]), None)
    return None if accuracy is None or key[0] == "joint" else accuracy - seed["last_accuracy"]


def _additional(seed: Mapping[str, Any], key: tuple[str, str], metrics: MetricsByCell) -> float | None:
    """Compute the bytes of all tasks as the paper counts them; of the upper bound, none."""
    return None if key[0] == "joint" else _paper_bytes(seed) * len(seed["matrix"])


def _share(seed: Mapping[str, Any], key: tuple[str, str], metrics: MetricsByCell) -> float | None:
    size = _additional(seed, key, metrics)
    return None if size is None else 100.0 * size / (4.0 * metrics[key]["parameters"])


def _megabytes(size: float | None) -> float | None:
    return None if size is None else size / MEGABYTE


# Metrics that are computed from a seed's metrics, the cell's key and the other cells.
DERIVED: Mapping[str, Callable[[Mapping[str, Any], tuple[str, str], MetricsByCell], float | None]] = {
    "paper_megabytes_per_task": lambda seed, key, metrics: _paper_bytes(seed) / MEGABYTE,
    "megabytes_per_task": lambda seed, key, metrics: seed["bytes_per_task"] / MEGABYTE,
    "gap_to_joint": _gap,
    "additional_megabytes": lambda seed, key, metrics: _megabytes(_additional(seed, key, metrics)),
    "additional_percent": _share,
}


def decimals_of(metric: str) -> int:
    """Return how many decimals a metric is shown with."""
    if "bytes_" in metric and "mega" not in metric:
        return 0
    return 4 if "megabytes" in metric or metric == "free_energy" else 2


def cell_text(number: Number) -> str:
    """Format a number as "ours ± std (paper x, difference)"."""
    if number.metric.startswith("error_"):  # of the size of rounding
        return NOTHING if number.mean is None else f"{number.mean:.1e}"
    places = decimals_of(number.metric)
    text = NOTHING if number.mean is None else f"{number.mean:.{places}f}"
    text += "" if number.std is None else f" ± {number.std:.{places}f}"
    if number.paper is None:
        return text
    gap = "" if number.difference is None else f", {number.difference:+.{places}f}".replace("-", "−")
    return f"{text} (paper {number.paper:.{places}f}{gap})"


def heading(line: Line, scale: Scale) -> str:
    """Return a row's or column's title, with the stream that stands for the paper's at a reduced scale."""
    stream = line.values.get("stream", "")
    stand_in = scale.streams.get(stream, {}).get("stream")
    is_replaced = stand_in not in (None, stream) and not scale.is_published
    return f"{line.title} (here {stand_in})" if is_replaced else line.title


def grids(result: Result) -> list[tuple[str, list[list[str]]]]:
    """Return a grid of texts for each metric: rows by columns, with headings."""
    columns = result.definition.columns
    tables = []
    for metric, title in result.definition.metrics.items():
        lines = [["", *(heading(column, result.scale) for column in columns)]]
        for row in result.rows():
            texts = (cell_text(result.number(row, column, metric)) for column in columns)
            lines.append([heading(row, result.scale), *texts])
        tables.append((title, lines))
    return tables


def format_markdown(result: Result) -> str:
    """Return headings, tables and what was not run."""
    definition, comparison = result.definition, result.definition.comparison
    lines = [f"# {definition.title}", ""]
    if comparison:
        lines += [f"{definition.source}. {comparison.describe()}", ""]
    else:
        lines += [f"{definition.source} of the paper. Scale `{result.scale.name}`: {result.scale.title}.", ""]
    numbers = "mean ± standard deviation" if comparison else PAPER_NUMBERS
    lines += [definition.about, ""] if definition.about else []
    lines += [f"![{definition.title}]({definition.name}.png)", ""]
    for title, grid in grids(result):
        lines += [f"**{title}**: {numbers}", "", github_table(grid)]
    lines += ["Settings that were chosen:", "", *(f"- {note}" for note in result.notes), ""] if result.notes else []
    if result.missing:
        reasons: dict[str, list[str]] = {}
        for cell, reason in result.missing.items():
            reasons.setdefault(reason, []).append(cell)
        lines += ["Not run:", "", *(f"- {'; '.join(cells)}: {reason}" for reason, cells in reasons.items()), ""]
    return "\n".join(lines)


def format_latex(result: Result) -> str:
    """Return a table per metric for the package booktabs."""
    parts = []
    for title, grid in grids(result):
        caption = f"% {result.definition.source}, {title}, scale {result.scale.name}\n"
        parts.append(caption + tabular(grid))
    return "\n".join(parts)


def format_csv(result: Result) -> str:
    """Return one line per number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for number in result.numbers.values():
        values = {**asdict(number), "difference": number.difference}
        cells = (values[name] for name in CSV_COLUMNS)
        writer.writerow(
            [format(cell, ".6g") if isinstance(cell, float) else "" if cell is None else cell for cell in cells]
        )
    return file.getvalue()
