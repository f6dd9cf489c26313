"""What `protosteer learn` found in a folder, and how it did on the images that it held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protosteer.photos.teaching import Check, Survey, Taught
from protosteer.report.tables import plain_table
from protosteer.util.text import counted, listed, printable

MOST_NAMED = 5  # unreadable files in a line


def found_table(found: Survey, held: Mapping[str, int]) -> Table:
    """One row per class. held: how many images of each class will be held out."""
    table = plain_table()
    table.add_column("Class")
    for heading in ("Images", "Held out"):
        table.add_column(heading, justify="right")
    if found.known:
        table.add_column("Known already, from task")
    for name, count in found.counts.items():
        note = [Text(printable(found.known.get(name, "")))] if found.known else []
        table.add_row(Text(printable(name)), f"{count:,}", f"{held.get(name, 0):,}", *note)
    return table


def found_line(found: Survey) -> str:
    counts = found.counts
    return f"{found.folder}: {counted(len(counts), 'class')}, {counted(len(found.files), 'image')}"


def unreadable_line(found: Survey) -> str:
    named = listed([str(path) for path in found.unreadable], MOST_NAMED)
    return f"{counted(len(found.unreadable), 'file')} cannot be read and will be left out: {named}"


def check_report(check: Check) -> list[RenderableType]:
    """Accuracy on the held-out images, class by class, and what was confused."""
    right = sum(a == b for a, b in zip(check.labels, check.predicted, strict=True))
    summary = (
        f"Self-check: {right} of {counted(len(check.labels), 'held-out image')} right, {check.accuracy:.1f} %"
    )
    table = plain_table()
    table.add_column("Class")
    for heading in ("Held out", "Right", "Accuracy"):
        table.add_column(heading, justify="right")
    for name, (shown, good) in check.per_class().items():
        table.add_row(Text(printable(name)), str(shown), str(good), f"{100 * good / shown:.1f} %")
    confused = check.confused()
    if not confused:
        return [Text(summary), table]
    lines = [printable(f"  {a} taken for {b}: {counted(times, 'time')}") for a, b, times in confused]
    return [Text(summary), table, Text("\n".join(["Most confused:", *lines]))]


def as_json(found: Survey, taught: Taught | None) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "found": {
            "folder": str(found.folder),
            "classes": found.counts,
            "unreadable": [str(path) for path in found.unreadable],
            "known": found.known,
        }
    }
    if taught:
        record = taught.record
        outcome["task"] = {
            "name": record.name,
            "classes": record.class_names,
            "images": sum(c.images for c in record.classes),
            "bytes": record.bytes,
            "trained": record.prompt is not None,
        }
        outcome["check"] = None if taught.check is None else _check(taught.check)
    return outcome


def _check(check: Check) -> dict[str, Any]:
    return {
        "images": len(check.labels),
        "accuracy": check.accuracy,
        "classes": {
            name: {"images": shown, "right": right} for name, (shown, right) in check.per_class().items()
        },
        "confused": [{"class": a, "taken_for": b, "times": times} for a, b, times in check.confused()],
    }
