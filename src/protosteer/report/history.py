"""Format the changes of a model file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from protosteer.model.history import Entry
from protosteer.report.tables import numbers, plain_table
from protosteer.util.text import listed

MAX_NAMED = 4  # classes of a change


def overview(entries: Sequence[Entry], versions: Sequence[str]) -> list[RenderableType]:
    """Show one row per change, the oldest first; `versions` can be restored."""
    table = plain_table(None, "When (UTC)", "Command", *numbers(["Classes"]), "Change (images)")
    for entry in entries:
        version = " *" if entry.version in versions else ""
        date = entry.date[:16].replace("T", " ")
        table.add_row(date, entry.command, f"{entry.classes:,}", _change(entry) + version)
    return [table, *([Text("* the model before this change is kept; undo restores the latest")] if versions else [])]


def _change(entry: Entry) -> str:
    parts = [f"{old_name} is {new_name}" for old_name, new_name in list(entry.renamed.items())[:MAX_NAMED]]
    parts += [_counts(sign, counts) for sign, counts in (("+", entry.added), ("-", entry.removed)) if counts]
    return "; ".join(parts) or "no image more or less"


def _counts(sign: str, counts: Mapping[str, int]) -> str:
    return listed([f"{name} {sign}{count:,}" for name, count in counts.items()], MAX_NAMED)
