"""Format methods: all as a table, or one in full."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protosteer.evaluation.method_info import MethodInfo
from protosteer.report.tables import NOTHING, labels, numbers, plain_table


def methods_table(methods: Iterable[MethodInfo], parameters: Mapping[str, int | None]) -> Table:
    """Show all methods; `parameters` is the number that each trains, by name."""
    parameter_count = numbers(["Parameters"], no_wrap=True)
    table = plain_table(None, labels("Name"), "Paper", "Stores", "Trains", *parameter_count)
    repeatable_names = []
    for method in methods:
        s = method.source
        paper = f"{s.authors}, {s.venue} {s.year}"
        table.add_row(method.name, paper, _describe_features(method), method.trains, _count(parameters[method.name]))
        repeatable_names += [method.name] if method.supports_repeated_classes else []
    table.caption = Text(f"Classes may be repeated: {', '.join(repeatable_names)}.")  # a column more would not fit
    table.caption_justify = "left"
    return table


def method_report(method: MethodInfo, parameters: int | None) -> list[RenderableType]:
    """Show one method: its paper, description, and every setting with its default."""
    s = method.source
    facts = plain_table(None, labels(), "")
    facts.show_header = False
    for name, value in (
        ("name", method.name),
        ("paper", f"{s.authors}: {s.title}. {s.venue} {s.year}"),
        ("images stored", method.rehearsal),
        ("features stored", method.features),
        ("trains", method.trains),
        ("repeated classes", "yes" if method.supports_repeated_classes else "no"),
        ("parameters", _count(parameters)),
    ):
        facts.add_row(name, value)
    return [facts, *_paragraphs(method.about), _settings(method), *_published(method)]


def _published(method: MethodInfo) -> list[RenderableType]:
    """Show the published settings of each benchmark, if any are known, and where they come from."""
    if not method.published:
        return []
    table = plain_table(None, labels("Benchmark"), "Published settings")
    for benchmark, values in method.published.items():
        table.add_row(benchmark, ", ".join(f"{n}={json.dumps(v)}" for n, v in values.items()) or "the defaults")
    return [table, Text(f"Source: {method.published_source}\n")]


def _describe_features(method: MethodInfo) -> str:
    """Describe what a method stores of single images: pixels or feature vectors."""
    if method.features == "no":
        return method.rehearsal
    return f"features: {method.features}"


def _count(parameters: int | None) -> str:
    return NOTHING if parameters is None else f"{parameters:,}"


def _paragraphs(text: str) -> list[Text]:
    """Rewrap paragraphs to the terminal's width; leave formulas and lists alone."""
    parts = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        verbatim = any(line.startswith((" ", "- ")) for line in lines)
        parts.append(Text((block if verbatim else " ".join(lines)) + "\n"))
    return parts


def _settings(method: MethodInfo) -> Table:
    table = plain_table(None, labels("Setting"), "Default")
    if method.choices:
        table.add_column("One of")
    for name, value in method.settings.items():
        default = value if isinstance(value, str) else json.dumps(value)
        table.add_row(name, default, ", ".join(method.choices.get(name, ())))
    return table
