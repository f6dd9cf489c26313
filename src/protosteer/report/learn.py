"""Format what `protosteer learn` found in a folder, and how accurate the model is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from protosteer.model.records import TaskRecord
from protosteer.report.tables import numbers, plain_table
from protosteer.util.statistics import MIN_PERCENT_IMAGES, Accuracy
from protosteer.util.text import counted, listed, similar_names
from protosteer.workflows.folder_scan import FolderScan
from protosteer.workflows.holdout_eval import Check
from protosteer.workflows.learn_folder import LearnResult
from protosteer.workflows.sort_files import UNKNOWN, UNSURE

MAX_NAMED_FILES = 3  # in a line


def found_table(scan: FolderScan) -> Table:
    """Show one row per class."""
    known = ["Known, from task"] if scan.known else []
    table = plain_table(None, "Class", *numbers(["Images"]), *known)
    for name, count in scan.counts.items():
        task = ", ".join(scan.known.get(name, ["new"]))
        table.add_row(name, f"{count:,}", *([task] if known else []))
    return table


def scan_lines(scan: FolderScan, known: Iterable[str] = ()) -> list[str]:
    """Say which files are skipped and why, which pictures are there twice, and which names are probably misspelt.

    Args:
        scan: What was found.
        known: Classes of the model.
    """
    lines = [f"skipped {files_of(paths)} ({reason}): {names_of(paths)}" for reason, paths in scan.skipped.items()]
    if scan.already_learned:
        lines.append(f"skipped {files_of(scan.already_learned)} (learned before): {names_of(scan.already_learned)}")
    rows = list(zip(scan.copies.paths, scan.copies.labels, scan.originals.paths, scan.originals.labels, strict=True))
    same = [f"{path} (of {original.name})" for path, label, original, other in rows if label == other]
    if same:
        lines.append(f"skipped {files_of(same)} (copy of another): {listed(same, MAX_NAMED_FILES)}")
    for path, label, original, other in rows:
        if label != other:
            lines.append(f"warning: {path} ({label}) is the same picture as {original}; learned as {other} only")
    for path, other in list(scan.learned_as_other_class.items())[:MAX_NAMED_FILES]:
        lines.append(f"warning: {path} was learned as {other} before, and is learned again as its folder says")
    for name in {UNKNOWN, UNSURE} & {*scan.counts}:
        lines.append(f"warning: '{name}', a folder that sort made, is learned as a class; move its images first")
    for name, near in similar_names(scan.counts, known):
        lines.append(f"warning: class '{name}': did you mean '{near}'? The two are different classes now")
    return lines


def files_of(paths: Sequence[object]) -> str:
    """Count files."""
    return counted(len(paths), "file")


def names_of(paths: Sequence[object]) -> str:
    """List the first files."""
    return listed([str(path) for path in paths], MAX_NAMED_FILES)


def result_lines(result: LearnResult, classes: int) -> list[str]:
    """Say how accurate the model is, what training brought, and what is confused most.

    Args:
        result: What was learned.
        classes: How many classes the model knows.
    """
    lines, estimate = [], result.accuracy
    if estimate:
        images = "" if estimate.images < MIN_PERCENT_IMAGES else f"{counted(estimate.images, 'image')} of "
        how = "never learned" if result.record.metadata.held_out else "leave-one-out"
        lines.append(f"Self-check: {estimate} right, {images}{counted(classes, 'class')}, {how}")
    if result.training == "skipped":
        lines.append(
            "Training skipped: the self-check found hardly any error; to train in any case, use the preset fast"
        )
    check, before = result.check, result.before_training
    if check and before:
        right = f"{check.accuracy.right} of {counted(check.accuracy.images, 'test image')} right with it"
        lines.append(f"Training {result.training}: {right}, {before.accuracy.right} without")
    if check and check.confused():
        confused = [f"{a} predicted as {b} ({counted(n, 'time')})" for a, b, n in check.confused(MAX_NAMED_FILES)]
        lines.append(f"Most confused: {', '.join(confused)}")
    return lines


def why_no_prompt(record: TaskRecord, scan: FolderScan) -> str:
    """Say why a task has no prompt although the settings train prompts."""
    if scan.known.keys() >= {*record.class_names}:
        return "nothing was trained: more images of known classes need no training"
    if record.shared_prompt is not None:
        return "nothing was trained: the shared prompt serves these classes, too"
    if len(record.classes) == 1:
        return "nothing was trained: training needs two classes or more"
    if record.independent:
        return "nothing was trained: independent folders share no prompt; the preset best trains one for each"
    return "nothing was trained: with these settings, only a model's first folder is trained"


def as_json(scan: FolderScan, taught: LearnResult | None) -> dict[str, Any]:
    """Return the scan and, if something was learned, the task and its evaluation as plain data."""
    outcome: dict[str, Any] = {
        "found": {
            "folder": str(scan.folder),
            "classes": scan.counts,
            "unreadable": [str(path) for path in scan.unreadable.paths],
            "skipped": {reason: [str(path) for path in paths] for reason, paths in scan.skipped.items()},
            "copies": {str(path): str(of) for path, of in zip(scan.copies.paths, scan.originals.paths, strict=True)},
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
        outcome["training"] = taught.training
        outcome["self_check"] = taught.accuracy and _accuracy(taught.accuracy)
        outcome["check"] = taught.check and _check(taught.check)
        outcome["check_before_training"] = taught.before_training and _check(taught.before_training)
    return outcome


def _check(check: Check) -> dict[str, Any]:
    return {
        **_accuracy(check.accuracy),
        "classes": {name: {"images": n, "right": right} for name, (n, right) in check.per_class().items()},
        "confused": [{"class": a, "taken_for": b, "times": times} for a, b, times in check.confused()],
    }


def _accuracy(accuracy: Accuracy) -> dict[str, Any]:
    return {"images": accuracy.images, "accuracy": accuracy.percent, "interval": list(accuracy.interval)}
