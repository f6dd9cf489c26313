"""Format the result of `protosteer suggest`."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protosteer.report.tables import numbers, plain_table
from protosteer.util.text import counted
from protosteer.workflows.active_learning import Suggestion, Suggestions

_REASONS = {
    "label": "worth labelling",
    "unknown": "unlike everything known",
    "mislabelled": "likelier of another class than their own",
}


def overview(result: Suggestions) -> list[RenderableType]:
    """Show the number of suggestions for each reason, and a table."""
    heads = [f"{counted(result.images, 'image')}: ", ", ".join(_head(result, why) for why in result.found)]
    return [Text("".join(heads)), *([_table(result)] if result.chosen else [])]


def _head(result: Suggestions, why: str) -> str:
    """Return the number of suggestions for a reason, and how many are shown if that is fewer."""
    shown = sum(suggestion.why == why for suggestion in result.chosen)
    suffix = "" if shown == result.found[why] else f" ({shown:,} shown)"
    number = result.found[why]
    head = counted(number, "near-duplicate") if why == "duplicate" else f"{number:,} {_REASONS[why]}"
    return f"{head}{suffix}"


def _table(result: Suggestions) -> Table:
    table = plain_table(None, "File", "Why", *numbers(["Probability"]), "Nearest class")
    for suggestion in result.chosen:
        probability = f"{100 * suggestion.probability:.1f} %"
        table.add_row(str(suggestion.path), _why(suggestion), probability, suggestion.guess)
    return table


def _why(suggestion: Suggestion) -> str:
    return {
        "label": "would teach most",
        "unknown": "unlike everything known",
        "duplicate": f"copy of {suggestion.other}",
        "mislabelled": f"filed under {suggestion.other}",
    }[suggestion.why]
