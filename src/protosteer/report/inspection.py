"""What `protosteer inspect` prints: a model's contents as `inspection.describe` tells them, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protosteer.report.tables import NOTHING, plain_table
from protosteer.util.text import counted, printable

MOST_ROWS = 60  # that are listed unless all are asked for
NAME_WIDTH = 28  # of a class or a task; longer ones go on in the next line
BAR_WIDTH = 20
UNITS = ("kB", "MB", "GB")

Told = Mapping[str, Any]


def overview(description: Told, all_classes: bool = False) -> list[RenderableType]:
    """All about one model; of many classes or tasks only the first are listed unless all are asked for."""
    tasks = description["tasks"]
    rows = [(i, task["name"], record) for task in tasks for i, record in enumerate(task["classes"])]
    most = len(rows) if all_classes else MOST_ROWS
    parts: list[RenderableType] = [_header(description)]
    if tasks:
        parts += [_tasks(tasks[:most]), *_left_out(len(tasks) - most, "more task")]
        parts += [_classes(rows[:most]), *_left_out(len(rows) - most, "more class")]
    if description["confusable"]:
        parts.append(_most_alike(description["confusable"]))
    return parts


def _left_out(number: int, things: str) -> list[RenderableType]:
    return [Text(f" … and {counted(number, things)}\n")] if number > 0 else []


def _header(description: Told) -> Table:
    """What is true of the model as a whole, a line each."""
    totals = description["totals"]
    lines = {
        "Model": _model_line(description["file"]),
        "Knows": _knows_line(totals),
        "Learned": _learned_line(totals),
        "Independent": _independent_line(description["tasks"]),
        "Size": _size_line(totals),
        "Unknown images": _rejection_line(description["rejection"]),
        "Backbone": _backbone_line(description["backbone"]),
        "Settings": _settings_line(description["settings"]["changed"]),
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, line in lines.items():
        table.add_row(heading, _name(line))
    table.add_row()
    return table


def _model_line(file: Told) -> str:
    size = "" if file["bytes"] is None else f", {human_bytes(file['bytes'])}"
    return f"{file['path']}{size}"


def _knows_line(totals: Told) -> str:
    return (
        f"{counted(totals['classes'], 'class')} from {counted(totals['images'], 'image')}, in "
        f"{counted(totals['tasks'], 'task')}, as {counted(totals['centroids'], 'centroid')}"
    )


def _learned_line(totals: Told) -> str:
    first, last = totals["first_learned"], totals["last_learned"]
    if first is None:
        return "dates not recorded"
    return f"on {first}" if first == last else f"from {first} to {last}"


def _independent_line(tasks: Sequence[Told]) -> str:
    alone = sum(task["independent"] for task in tasks)
    return f"{alone:,} of {counted(len(tasks), 'task')} (learned from their own images alone)"


def _size_line(totals: Told) -> str:
    if not totals["classes"]:
        return "nothing has been learned"
    per_class, per_task = (human_bytes(totals[name]) for name in ("bytes_per_class", "bytes_per_task"))
    line = f"{per_class} per class, {per_task} per task"
    times = totals["times_smaller"]
    if times is None:
        return line
    compared = f"{_times(times)} smaller" if times >= 1 else f"{_times(1 / times)} larger"
    return f"{line}; the file is {compared} than the images ({human_bytes(totals['image_bytes'])})"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def _rejection_line(rejection: Told) -> str:
    if not rejection["calibrated"]:
        return "cannot be rejected, as no images were held out"
    return f"can be rejected, with thresholds from {counted(rejection['held_out'], 'held-out image')}"


def _backbone_line(backbone: Told) -> str:
    facts = [f"{backbone['name']} ({backbone['fingerprint'][:12]})", f"{backbone['image_size']}-pixel images"]
    if backbone["depth"] is not None:
        facts.append(counted(backbone["depth"], "layer"))
    if backbone["dim"] is not None:
        facts.append(counted(backbone["dim"], "dimension"))
    if backbone["weights"]:
        facts.append(f"weights from {backbone['weights']}")
    return ", ".join(facts)


def _settings_line(changed: Sequence[Told]) -> str:
    return ", ".join(f"{one['name']} {_value(one['value'])}" for one in changed) or "defaults"


def _value(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _tasks(tasks: Sequence[Told]) -> Table:
    table = plain_table("Tasks")
    _add_names(table, "Task")
    table.add_column("Learned", no_wrap=True)
    _add_figures(table, "Classes", "Images", "Size", "Prompt")
    table.add_column("How", no_wrap=True)
    for task in tasks:
        prompt = task["prompt"]
        table.add_row(
            _name(task["name"]),
            _name(task["learned"] or NOTHING),
            f"{len(task['classes']):,}",
            f"{task['images']:,}",
            human_bytes(task["bytes"]),
            human_bytes(prompt["bytes"]) if prompt else NOTHING,
            _how(task),
        )
    return table


def _how(task: Told) -> str:
    if task["few_shot"]:
        return "few-shot"
    if not task["trained"]:
        return "no training"
    return "trained alone" if task["independent"] else "trained"


def _classes(rows: Sequence[tuple[int, str, Told]]) -> Table:
    """rows: number within the task, task, class. A task is named beside the first of its classes."""
    table = plain_table("Classes")
    _add_names(table, "Class", "Task")
    _add_figures(table, "Images", "Held out", "Centroids", "Size")
    for i, task_name, record in rows:
        table.add_row(
            _name(record["name"]),
            Text("") if i else _name(task_name),
            f"{record['images']:,}",
            f"{record['held_out']:,}",
            f"{record['keys'] + record['values']:,}",
            human_bytes(record["bytes"]),
        )
    return table


def _most_alike(pairs: Sequence[Told]) -> Table:
    """The bar of a pair is as long as its cosine is great: none for 0, full for 1."""
    table = plain_table("Most alike (greatest cosine between centroids)")
    _add_names(table, "Class", "and class")
    _add_figures(table, "Cosine")
    table.add_column("", no_wrap=True)
    for pair in pairs:
        bar = ProgressBar(total=1.0, completed=max(0.0, pair["similarity"]), width=BAR_WIDTH)
        table.add_row(_name(pair["a"]), _name(pair["b"]), f"{pair['similarity']:.3f}", bar)
    return table


def _add_names(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, style="bold", overflow="fold", max_width=NAME_WIDTH)


def _add_figures(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def _name(name: str) -> Text:
    return Text(printable(name))  # a file from someone else may hold any text: never markup


def human_bytes(size: float) -> str:
    """Three digits and a unit, each a thousand times the one before."""
    if size < 999.5:
        return f"{size:.0f} bytes"
    power = 1
    while size / 1000**power >= 999.5 and power < len(UNITS):
        power += 1
    number = size / 1000**power
    return f"{number:,.{0 if number >= 99.95 else 1}f} {UNITS[power - 1]}"
