"""What `protosteer suggest` found, for a person."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protosteer.report.tables import numbers, plain_table
from protosteer.util.text import counted, printable
from protosteer.workflows.active_learning import Suggestion, Suggestions

# How many there are for each reason is said above the table, why it is in its rows.
_TOLD = {
    "label": "worth labelling",
    "unknown": "unlike everything known",
    "mislabelled": "likelier of another class than their own",
}


def overview(found: Suggestions) -> list[RenderableType]:
    """How many there are for each reason, and a table."""
    heads = [f"{counted(found.images, 'image')}: ", ", ".join(_head(found, why) for why in found.found)]
    return [Text("".join(heads)), *([_table(found)] if found.chosen else [])]


def _head(found: Suggestions, why: str) -> str:
    """All of them, and how many of these are shown where that is fewer."""
    shown = sum(one.why == why for one in found.chosen)
    few = "" if shown == found.found[why] else f" ({shown:,} shown)"
    number = found.found[why]
    head = counted(number, "near-duplicate") if why == "duplicate" else f"{number:,} {_TOLD[why]}"
    return f"{head}{few}"


def _table(found: Suggestions) -> Table:
    table = plain_table(None, "File", "Why", *numbers(["Probability"]), "Nearest class")
    for one in found.chosen:
        cells = (str(one.path), _why(one), f"{100 * one.probability:.1f} %", one.guess)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _why(one: Suggestion) -> str:
    return {
        "label": "would teach most",
        "unknown": "unlike everything known",
        "duplicate": f"copy of {one.other}",
        "mislabelled": f"filed under {one.other}",
    }[one.why]
