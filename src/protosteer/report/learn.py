"""Format what `protosteer learn` found in a folder, and its accuracy on held-out images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protosteer.model.records import TaskRecord
from protosteer.report.tables import numbers, plain_table
from protosteer.util.text import counted, printable
from protosteer.workflows.holdout_eval import Check
from protosteer.workflows.learn_folder import FolderScan, LearnResult


def found_table(scan: FolderScan, held: Mapping[str, int]) -> Table:
    """Show one row per class; `held` is the number of held-out images by class."""
    known = ["Known, from task"] if scan.known else []
    table = plain_table(None, "Class", *numbers(["Images", "Held out"]), *known)
    for name, count in scan.counts.items():
        task = Text(printable(", ".join(scan.known.get(name, ["new"]))))
        table.add_row(Text(printable(name)), f"{count:,}", f"{held[name]:,}", *([task] if known else []))
    return table


def check_report(check: Check, before_training: Check | None = None) -> list[RenderableType]:
    """Show the accuracy on held-out images by class, and the most frequent confusions."""
    held = counted(len(check.labels), "held-out image")
    table = plain_table(None, "Class", *numbers(["Held out", "Right", "Accuracy"]))
    for name, (shown, good) in check.per_class().items():
        table.add_row(Text(printable(name)), str(shown), str(good), f"{100 * good / shown:.1f} %")
    confused = [f"  {a} taken for {b}: {counted(n, 'time')}" for a, b, n in check.confused()]
    lines = "\n".join(["Most confused:", *map(printable, confused)])
    summary = f"Self-check: {check.right} of {held} right, {check.accuracy:.1f} %"
    if before_training:
        summary += f" (before training {before_training.right}, {before_training.accuracy:.1f} %)"
    return [Text(summary), table, *([Text(lines)] if confused else [])]


def why_no_prompt(record: TaskRecord, scan: FolderScan) -> str:
    """Say why a task has no prompt although the settings train prompts."""
    if scan.known.keys() >= {*record.class_names}:
        return "no prompt was trained: more images of known classes need none"
    if record.shared_prompt is not None:
        return "no prompt was trained: the shared prompt serves these classes too"
    if len(record.classes) == 1:
        return "no prompt was trained: one class has nothing to be told from"
    return "no prompt was trained: by these settings only the first task has one"


def as_json(scan: FolderScan, taught: LearnResult | None) -> dict[str, Any]:
    """Return the scan and, if something was learned, the task and its evaluation as plain data."""
    outcome: dict[str, Any] = {
        "found": {
            "folder": str(scan.folder),
            "classes": scan.counts,
            "unreadable": [str(path) for path in scan.unreadable.paths],
            "known": scan.known,
            "again": [str(path) for path in scan.already_learned],
            "other": {str(path): name for path, name in scan.learned_as_other_class.items()},
        }
    }
    if taught:
        record = taught.record
        outcome["task"] = {
            "name": record.name,
            "classes": record.class_names,
            "images": record.images,
            "bytes": record.bytes,
            "trained": record.prompt is not None,
        }
        outcome["check"] = taught.check and _check(taught.check)
        outcome["check_before_training"] = taught.before_training and _check(taught.before_training)
    return outcome


def _check(check: Check) -> dict[str, Any]:
    return {
        "images": len(check.labels),
        "accuracy": check.accuracy,
        "classes": {name: {"images": n, "right": right} for name, (n, right) in check.per_class().items()},
        "confused": [{"class": a, "taken_for": b, "times": times} for a, b, times in check.confused()],
    }
