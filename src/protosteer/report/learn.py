"""Format the scan of a folder by `protosteer learn`, and the accuracy of the model."""

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
    """Tabulate the classes of a scan with the numbers of their images."""
    task_heading = ["Known, from task"] if scan.known else []
    table = plain_table(None, "Class", *numbers(["Images"]), *task_heading)
    for name, count in scan.counts.items():
        task = ", ".join(scan.known.get(name, ["new"]))
        table.add_row(name, f"{count:,}", *([task] if task_heading else []))
    return table


def scan_lines(scan: FolderScan, known_names: Iterable[str] = ()) -> list[str]:
    """Return lines about skipped files and why, duplicate pictures, and names that are probably misspelt.

    Args:
        scan: The scan of the folder.
        known_names: Classes of the model.
    """
    lines = [f"skipped {files_of(paths)} ({reason}): {names_of(paths)}" for reason, paths in scan.skipped.items()]
    if scan.already_learned:
        lines.append(f"skipped {files_of(scan.already_learned)} (learned before): {names_of(scan.already_learned)}")
    rows = list(zip(scan.copies.paths, scan.copies.labels, scan.originals.paths, scan.originals.labels, strict=True))
    copies = [f"{path} (of {original.name})" for path, label, original, class_name in rows if label == class_name]
    if copies:
        lines.append(f"skipped {files_of(copies)} (copy of another): {listed(copies, MAX_NAMED_FILES)}")
    for path, label, original, class_name in rows:
        if label != class_name:
            lines.append(f"warning: {path} ({label}) is the same picture as {original}; learned as {class_name} only")
    for path, class_name in list(scan.learned_as_other_class.items())[:MAX_NAMED_FILES]:
        lines.append(f"warning: {path} was learned as {class_name} before, and is learned again as its folder says")
    for name in {UNKNOWN, UNSURE} & {*scan.counts}:
        lines.append(f"warning: '{name}', a folder that sort made, is learned as a class; move its images first")
    for name, near in similar_names(scan.counts, known_names):
        lines.append(f"warning: class '{name}': did you mean '{near}'? The two are different classes now")
    return lines


def files_of(paths: Sequence[object]) -> str:
    """Return the number of files in words."""
    return counted(len(paths), "file")


def names_of(paths: Sequence[object]) -> str:
    """Return the names of the first files."""
    return listed([str(path) for path in paths], MAX_NAMED_FILES)


def result_lines(result: LearnResult, classes: int) -> list[str]:
    """Return lines about the accuracy of the model, the effect of training, and the most frequent confusions.

    Args:
        result: The result of learning a task.
        classes: The number of classes of the model.
    """
    lines, estimate = [], result.accuracy
    if estimate:
        images = "" if estimate.images < MIN_PERCENT_IMAGES else f"{counted(estimate.images, 'image')} of "
        basis = "never learned" if result.record.metadata.held_out else "leave-one-out"
        lines.append(f"Self-check: {estimate} right, {images}{counted(classes, 'class')}, {basis}")
    if result.training == "skipped":
        lines.append(
            "Training skipped: the self-check found hardly any error; to train in any case, use the preset fast"
        )
    check, earlier_check = result.check, result.before_training
    if check and earlier_check:
        score = f"{check.accuracy.right} of {counted(check.accuracy.images, 'test image')} right with it"
        lines.append(f"Training {result.training}: {score}, {earlier_check.accuracy.right} without")
    if check and check.confused():
        confusions = [f"{a} predicted as {b} ({counted(n, 'time')})" for a, b, n in check.confused(MAX_NAMED_FILES)]
        lines.append(f"Most confused: {', '.join(confusions)}")
    return lines


def why_no_prompt(record: TaskRecord, scan: FolderScan) -> str:
    """Return the reason why a task has no prompt although the settings train prompts."""
    if scan.known.keys() >= {*record.class_names}:
        return "nothing was trained: more images of known classes need no training"
    if record.shared_prompt is not None:
        return "nothing was trained: the shared prompt serves these classes, too"
    if len(record.classes) == 1:
        return "nothing was trained: training needs two classes or more"
    if record.independent:
        return "nothing was trained: independent folders share no prompt; the preset best trains one for each"
    return "nothing was trained: with these settings, only a model's first folder is trained"


def as_json(scan: FolderScan, result: LearnResult | None) -> dict[str, Any]:
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
    if result:
        record = result.record
        outcome["task"] = {
            "name": record.name,
            "classes": record.class_names,
            "images": record.images,
            "bytes": record.bytes,
            "trained": record.prompt is not None,
        }
        outcome["training"] = result.training
        outcome["self_check"] = result.accuracy and _accuracy(result.accuracy)
        outcome["check"] = result.check and _check(result.check)
        outcome["check_before_training"] = result.before_training and _check(result.before_training)
    return outcome


def _check(check: Check) -> dict[str, Any]:
    return {
        **_accuracy(check.accuracy),
        "classes": {name: {"images": n, "right": hits} for name, (n, hits) in check.per_class().items()},
        "confused": [{"class": a, "taken_for": b, "times": times} for a, b, times in check.confused()],
    }


def _accuracy(accuracy: Accuracy) -> dict[str, Any]:
    return {"images": accuracy.images, "accuracy": accuracy.percent, "interval": list(accuracy.interval)}
