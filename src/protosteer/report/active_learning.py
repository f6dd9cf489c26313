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
    counts = ", ".join(_count_reason(result, reason) for reason in result.found)
    return [Text(f"{counted(result.images, 'image')}: {counts}"), *([_table(result)] if result.chosen else [])]


def _count_reason(result: Suggestions, reason: str) -> str:
    """Return the number of suggestions for a reason, and how many are shown if that is fewer."""
    count = sum(suggestion.why == reason for suggestion in result.chosen)
    suffix = "" if count == result.found[reason] else f" ({count:,} shown)"
    number = result.found[reason]
    head = counted(number, "near-duplicate") if reason == "duplicate" else f"{number:,} {_REASONS[reason]}"
    return f"{head}{suffix}"


def _table(result: Suggestions) -> Table:
    table = plain_table(None, "File", "Why", *numbers(["Probability"]), "Nearest class")
    for suggestion in result.chosen:
        probability = f"{100 * suggestion.probability:.1f} %"
        table.add_row(str(suggestion.path), _describe_reason(suggestion), probability, suggestion.guess)
    return table


def _describe_reason(suggestion: Suggestion) -> str:
    return {
        "label": "would teach most",
        "unknown": "unlike everything known",
        "duplicate": f"copy of {suggestion.other}",
        "mislabelled": f"filed under {suggestion.other}",
    }[suggestion.why]
