"""Format a model's contents as `protosteer inspect` prints them, from `model_summary.describe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from protosteer.report.tables import NOTHING, numbers, plain, plain_table
from protosteer.util.text import counted

MAX_ROWS = 60  # unless all are requested
NAME_WIDTH = 28  # characters of a class or a task; longer ones wrap
BAR_WIDTH = 20

Description = Mapping[str, Any]


def overview(description: Description, all_classes: bool = False) -> list[RenderableType]:
    """Return the parts of a model's description; of many classes or tasks only the first, unless all are requested."""
    tasks = [task for task in description["tasks"] if not (task["corrected"] or task["compacted"])]
    rows = [(i, task["name"], record) for task in tasks for i, record in enumerate(task["classes"])]
    limit = len(rows) if all_classes else MAX_ROWS
    parts: list[RenderableType] = [_header(description)]
    if tasks:
        parts += [_tasks(tasks[:limit]), *_remainder(len(tasks) - limit, "more task")]
        parts += [_classes(rows[:limit]), *_remainder(len(rows) - limit, "more class")]
    if description["confusable"]:
        parts.append(_most_similar(description["confusable"]))
    return parts


def _remainder(number: int, things: str) -> list[RenderableType]:
    return [Text(f" … and {counted(number, things)}\n")] if number > 0 else []


def _header(description: Description) -> Table:
    """Show facts about the whole model, one per line."""
    file, totals, tasks = description["file"], description["totals"], description["tasks"]
    changes, evidence = description["settings"]["changed"], description["evidence"]
    # An empty model has no classifier to describe; its settings name the rule.
    default_rule = bool(evidence) or description["settings"]["all"].get("rule") == "evidence"
    prototypes = counted(totals["points"], "prototype") if default_rule else counted(totals["centroids"], "centroid")
    lines = {
        "Model": ", ".join([file["path"], *([] if file["bytes"] is None else [human_bytes(file["bytes"])])]),
        "Knows": f"{counted(totals['classes'], 'class')} from {counted(totals['images'], 'image')}, in "
        f"{counted(totals['tasks'], 'task')}, as {prototypes}",
        "Learned": _dates(totals["first_learned"], totals["last_learned"]),
        **_corrections("Corrected", [t for t in tasks if not t["confirmed"] and (t["compacted"] or t["corrected"])]),
        **_corrections("Confirmed", [t for t in tasks if t["confirmed"]]),
        "Independent": f"{sum(task['independent'] for task in tasks):,} of {counted(len(tasks), 'task')} "
        "(learned from their own images alone)",
        "Size": _sizes(totals),
        "Rule": "evidence (the default classifier)" if default_rule else "paper (CPP inference)",
        **(_evidence(evidence) if evidence else {}),
        "Unknown images": _describe_rejection(description["rejection"], default_rule),
        "Backbone": _backbone(description["backbone"]),
        "Precision": " and ".join(description["precision"]) or "nothing has been learned",
        "Settings": ", ".join(f"{setting['name']} {_value(setting['value'])}" for setting in changes) or "defaults",
    }
    table = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for heading, line in lines.items():
        table.add_row(heading, plain(line))
    for i, note in enumerate(description["notes"]):
        table.add_row("" if i else "Note", plain(note))
    table.add_row()
    return table


def _evidence(evidence: Description) -> dict[str, str]:
    """Describe the shared prompt and the calibration of probabilities, by heading."""
    prompt, views = evidence["domain_prompt"], evidence["views"]
    weight = sum(view["weight"] for view in views)
    shares = [f"{100 * view['weight'] / weight:.0f} % {'with' if view['prompt'] else 'without'} it" for view in views]
    weighs = f"; predictions weigh {', '.join(shares)}" if prompt else ""
    images = counted(evidence["left_out"], "image")
    return {
        "Shared prompt": f"{human_bytes(prompt['bytes'])}{weighs}" if prompt else "none",
        "Probabilities": f"calibrated by leave-one-out on {images}"
        if evidence["left_out"]
        else "not calibrated, as no class has two images",
    }


def _corrections(title: str, tasks: Sequence[Description]) -> dict[str, str]:
    """Return one line for all corrections, or all confirmations, of which there may be hundreds."""
    if not tasks:
        return {}
    images = counted(sum(task["images"] for task in tasks), "image")
    return {title: f"{images}, the last on {tasks[-1]['learned']}"}


def _describe_rejection(rejection: Description, evidence: bool) -> str:
    if not rejection["calibrated"]:
        reason = "no class has two images" if evidence else "no images were held out"
        return f"cannot be rejected, as {reason}"
    images = "leave-one-out" if evidence else counted(rejection["held_out"], "held-out image")
    return f"can be rejected, with thresholds from {images}"


def _dates(first_date: str | None, last_date: str | None) -> str:
    if first_date is None:
        return "dates not recorded"
    return f"on {first_date}" if first_date == last_date else f"from {first_date} to {last_date}"


def _sizes(totals: Description) -> str:
    if not totals["classes"]:
        return "nothing has been learned"
    per_class, per_task = (human_bytes(totals[name]) for name in ("bytes_per_class", "bytes_per_task"))
    line = f"{per_class} per class, {per_task} per task"
    times = totals["times_smaller"]
    if times is None:
        return line
    ratio, word = (times, "smaller") if times >= 1 else (1 / times, "larger")
    comparison = f"{ratio:,.{0 if ratio >= 10 else 1}f} times {word}"
    return f"{line}; the file is {comparison} than the images ({human_bytes(totals['image_bytes'])})"


def _backbone(backbone: Description) -> str:
    facts = [f"{backbone['name']} ({backbone['fingerprint'][:12]})", f"{backbone['image_size']}-pixel images"]
    for name, thing in (("depth", "layer"), ("dim", "dimension")):
        facts += [] if backbone[name] is None else [counted(backbone[name], thing)]
    return ", ".join(facts + ([f"weights from {backbone['weights']}"] if backbone["weights"] else []))


def _value(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _tasks(tasks: Sequence[Description]) -> Table:
    figures = numbers(["Classes", "Images", "Size", "Prompt"], no_wrap=True)
    dates, remarks = Column("Learned", no_wrap=True), Column("How", no_wrap=True)
    table = plain_table("Tasks", *_names("Task"), dates, *figures, remarks)
    for task in tasks:
        prompt = task["prompt"]
        table.add_row(
            task["name"],
            task["learned"] or NOTHING,
            f"{len(task['classes']):,}",
            f"{task['images']:,}",
            human_bytes(task["bytes"]),
            human_bytes(prompt["bytes"]) if prompt else NOTHING,
            _describe_training(task),
        )
    return table


def _describe_training(task: Description) -> str:
    if task["few_shot"]:
        return "few-shot"
    if task["unfinished"]:
        return "prompt to come"
    if not task["trained"]:
        return "no training"
    return "trained alone" if task["independent"] else "trained"


def _classes(rows: Sequence[tuple[int, str, Description]]) -> Table:
    """Show classes; each row has the class's number in its task, the task's name and the class."""
    if any(record["points"] for *_, record in rows):
        figures = {"Images": "images", "Prototypes": "points"}
    else:
        figures = {"Images": "images", "Held out": "held_out", "Centroids": "centroids"}
    table = plain_table("Classes", *_names("Class", "Task"), *numbers([*figures, "Size"], no_wrap=True))
    for i, task_name, record in rows:
        counts = {**record, "centroids": record["keys"] + record["values"]}
        cells = (f"{counts[figure] or 0:,}" for figure in figures.values())
        table.add_row(record["name"], "" if i else task_name, *cells, human_bytes(record["bytes"]))
    return table


def _most_similar(pairs: Sequence[Description]) -> Table:
    """Show pairs of similar classes; a bar has the length of the cosine, from 0 to 1."""
    title = "Most alike (greatest cosine between centroids)"
    cosine, bar = *numbers(["Cosine"], no_wrap=True), Column(no_wrap=True)
    table = plain_table(title, *_names("Class", "and class"), cosine, bar)
    for pair in pairs:
        length = ProgressBar(total=1.0, completed=max(0.0, pair["similarity"]), width=BAR_WIDTH)
        table.add_row(pair["a"], pair["b"], f"{pair['similarity']:.3f}", length)
    return table


def _names(*headings: str) -> list[Column]:
    return [Column(name, style="bold", overflow="fold", max_width=NAME_WIDTH) for name in headings]


def human_bytes(size: float) -> str:
    """Format bytes with three digits and a decimal unit."""
    units = ["bytes", "kB", "MB", "GB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    decimals = 0 if units[0] == "bytes" or size >= 99.95 else 1
    return f"{size:,.{decimals}f} {units[0]}"
