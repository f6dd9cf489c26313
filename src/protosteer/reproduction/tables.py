"""Tables of `protosteer reproduce` for terminals."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from protosteer.evaluation.experiment import Experiment
from protosteer.report.tables import labels, numbers, plain_table
from protosteer.reproduction.cost import Cost
from protosteer.reproduction.definition import Definition
from protosteer.reproduction.results import Result, grids
from protosteer.util.text import counted


def experiments_table(definitions: Sequence[Definition]) -> Table:
    """List experiments."""
    table = plain_table("Experiments of the paper, and comparisons", labels(), "Where", "What")
    for definition in definitions:
        table.add_row(definition.name, definition.source, definition.title)
    return table


def result_tables(result: Result) -> list[Table]:
    """Show a table per metric: ours, the paper's and the difference."""
    tables = []
    for title, (heading, *lines) in grids(result):
        table = plain_table(f"{result.definition.title}: {title}", labels(), *numbers(heading[1:]))
        for line in lines:
            table.add_row(*map(Text, line))
        tables.append(table)
    return tables


def cost_table(costs: Sequence[Cost], title: str) -> Table:
    """List runs with what they cost; the last line is the sum."""
    counts = ("train_images", "test_images", "training_passes", "forward_passes")
    headings = (
        "seeds", "training images", "test images", "training passes, at most", "forward passes, at most", "time",
    )  # fmt: skip
    table = plain_table(title, labels(), "what", *numbers(headings))
    for cost in costs:
        cells = [len(cost.run.seeds or ()), *(getattr(cost, name) for name in counts)]
        name, about = Text(cost.run.folder.name), Text(_describe_run(cost.run))
        table.add_row(name, about, *(f"{cell:,}" for cell in cells), format_duration(cost.seconds))
    sums = [sum(len(cost.run.seeds or ()) for cost in costs)]
    sums += [sum(getattr(cost, name) for cost in costs) for name in counts]
    if costs:
        table.rows[-1].end_section = True
    total = format_duration(sum(cost.seconds for cost in costs))
    table.add_row(counted(len(costs), "run"), "", *(f"{number:,}" for number in sums), total)
    return table


def _describe_run(run: Experiment) -> str:
    """Name the settings that were chosen for a run."""
    words = [f"{name}={value}" for name, value in run.settings.items()]
    return " ".join([*words, *(["evaluates"] if run.states_from else [])])


def format_duration(seconds: float) -> str:
    """Format a time, such as "3 min"; a finished run takes none."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}" if seconds else "done"
    return f"{seconds / 86_400:.0f} days"
