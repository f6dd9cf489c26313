"""Definitions of the paper's experiments and of further comparisons, read from TOML files.

An experiment is a grid of rows and columns. Each cell is a run, or a number that is only cited. Rows and columns hold a
title and values of `Experiment.from_values`; `stream` and `backbone` are names that a scale gives a meaning to. The file
`scales.toml` defines the scales. See experiments/paper/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import protosteer
from protosteer.errors import SettingsError
from protosteer.settings import load_toml
from protosteer.util.text import suggestion

SCALES = "scales.toml"
ALL = "all"
REQUIRED_KEYS = ("title", "source", "metrics", "rows")
ALLOWED_KEYS = (*REQUIRED_KEYS, "about", "columns", "comparison", "paper", "plot", "run", "scales", "study")


@dataclass(frozen=True)
class Line:
    """A row or a column of an experiment.

    Attributes:
        key: Its name in the file.
        title: Its heading.
        values: What its runs have in common, as `Experiment.from_values` takes them.
        is_cited: Whether only the paper's numbers are shown, because nothing here can be run.
        learned_in: The column whose learned states are evaluated; "": the runs learn.
    """

    key: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    is_cited: bool = False
    learned_in: str = ""


@dataclass(frozen=True)
class Comparison:
    """The protocol of a table that is not the paper's: methods on equal footing.

    Attributes:
        class_orders: Seeds of class orders; every run is repeated for each.
        seeds: The seeds of every run.
        at_most: Settings that are reduced to these values where a method's own are larger. A method keeps all other
            defaults; what the scale sets for methods is not used.
        is_tuned: Whether each method's grid is searched first; see `reproduction.tuning`.
        precision: Of all runs.
    """

    class_orders: tuple[int, ...]
    seeds: tuple[int, ...]
    at_most: Mapping[str, int]
    is_tuned: bool
    precision: str

    def describe(self) -> str:
        """Return a sentence about the protocol."""
        orders, seeds = (", ".join(map(str, numbers)) for numbers in (self.class_orders, self.seeds))
        caps = " and ".join(f"{name} at most {value}" for name, value in self.at_most.items())
        tuning_note = "; settings chosen from each method's grid on validation images of the first task" * self.is_tuned
        return f"Class orders {orders}; seeds {seeds}; authors' schedules with {caps}; {self.precision}{tuning_note}."


@dataclass(frozen=True)
class Definition:
    """One table or figure of the paper, or a comparison of our own.

    Attributes:
        name: What `protosteer reproduce` takes.
        title: What it shows.
        source: Where it is in the paper.
        metrics: Headings of the metrics, by their names.
        columns: The columns.
        rows: The rows.
        about: A sentence for the reader: what the paper claims, or what differs here.
        values: What all runs have in common.
        paper: By row and column: mean and standard deviation of each metric; None where the paper has none.
        plot: How it is drawn, a name of `plots.PLOTS`.
        study: The function that fills the cells, a name of `studies.STUDIES`; "": each cell is a run.
        scales: By scale: values of `rows` and `columns` that the scale changes; see `at_scale`.
        comparison: The protocol of a table that is not the paper's, and that `all` leaves out; None: one of the paper.
    """

    name: str
    title: str
    source: str
    metrics: Mapping[str, str]
    columns: tuple[Line, ...]
    rows: tuple[Line, ...]
    about: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plot: str = "bars"
    study: str = ""
    scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    comparison: Comparison | None = None

    def at_scale(self, scale: str) -> Definition:
        """Return the definition with what a scale changes in its rows and columns."""
        changes = self.scales.get(scale, {})
        rows, columns = (_change_lines(getattr(self, part), changes.get(part, {})) for part in ("rows", "columns"))
        return replace(self, rows=rows, columns=columns)

    def paper_value(self, row: str, column: str, metric: str) -> tuple[float | None, float | None]:
        """Return the paper's mean and standard deviation of a cell; None for what it does not say."""
        numbers = self.paper.get(row, {}).get(column, [])
        position = list(self.metrics).index(metric)
        value = numbers[position] if position < len(numbers) else None
        if value in (None, [], ""):
            return None, None
        mean, *std = value if isinstance(value, list) else [value]
        return float(mean), float(std[0]) if std else None


@dataclass(frozen=True)
class Scale:
    """What streams, backbones and methods are at one scale.

    Attributes:
        name: Its name.
        title: A sentence about it.
        seeds: The seeds of every run.
        streams: By the paper's stream: what stands for it, with settings for the methods that have them.
        backbones: By the paper's backbone: what stands for it.
        methods: By method: settings at this scale.
        is_published: Whether methods have the settings that their authors published for a stream.
    """

    name: str
    title: str
    seeds: tuple[int, ...]
    streams: Mapping[str, Mapping[str, Any]]
    backbones: Mapping[str, Mapping[str, Any]]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_published: bool = False


def catalogue() -> Path:
    """Return the folder of definitions: of the checkout, or installed with the package."""
    package = Path(protosteer.__file__).resolve().parent
    folders = (package / "assets" / "paper", package.parents[1] / "experiments" / "paper")
    folder = next((folder for folder in folders if (folder / SCALES).is_file()), None)
    if folder is None:
        message = f"the definitions of the paper's experiments are missing: {folders[1]} has no {SCALES}"
        raise SettingsError(message, code="no-definitions", path=folders[1])
    return folder


def names(folder: Path) -> list[str]:
    """List the experiments in a folder of definitions."""
    return sorted(path.stem for path in folder.glob("*.toml") if path.name != SCALES)


def read_definition(folder: Path, name: str) -> Definition:
    """Read an experiment's definition.

    Raises:
        SettingsError: There is none (code "unknown-experiment"), or it is wrong (code "bad-definition").
    """
    known_names = names(folder)
    if name not in known_names:
        message = f"no experiment is called '{name}'; {suggestion(name, [*known_names, ALL])}"
        raise SettingsError(message, code="unknown-experiment", name=name)
    path = folder / f"{name}.toml"
    table = load_toml(path)
    problems = [f"{key} is missing" for key in REQUIRED_KEYS if key not in table]
    problems += [f"{key} is unknown" for key in table if key not in ALLOWED_KEYS]
    if problems:
        raise SettingsError(f"{path}: {problems[0]}", code="bad-definition", path=path)
    return Definition(
        name,
        columns=_read_lines(table.pop("columns", {"value": {"title": ""}})),
        rows=_read_lines(table.pop("rows")),
        values=table.pop("run", {}),
        comparison=_read_comparison(table.pop("comparison", None)),
        **table,
    )


def _read_comparison(table: Mapping[str, Any] | None) -> Comparison | None:
    if table is None:
        return None
    orders, seeds = tuple(table["class_orders"]), tuple(table["seeds"])
    return Comparison(orders, seeds, table["at_most"], table["tuned"], table["precision"])


def _read_lines(table: Mapping[str, Mapping[str, Any]]) -> tuple[Line, ...]:
    lines = []
    for key, entry in table.items():
        values = dict(entry)
        title, is_cited, learned_in = values.pop("title", key), values.pop("cited", False), values.pop("learned_in", "")
        lines.append(Line(key, title, values, is_cited, learned_in))
    return tuple(lines)


def _change_lines(lines: tuple[Line, ...], changes: Mapping[str, Mapping[str, Any]]) -> tuple[Line, ...]:
    new_lines = []
    for line in lines:
        values = {"title": line.title, **line.values, **changes.get(line.key, {})}
        new_lines.append(replace(line, title=values.pop("title"), values=values))
    return tuple(new_lines)


def read_scale(folder: Path, name: str) -> Scale:
    """Read one scale from `scales.toml`; raises SettingsError (code "unknown-scale") if there is none."""
    table = load_toml(folder / SCALES)
    if name not in table:
        message = f"no scale is called '{name}'; {suggestion(name, list(table))}"
        raise SettingsError(message, code="unknown-scale", name=name)
    values = table[name]
    return Scale(
        name=name,
        title=values["title"],
        seeds=tuple(values["seeds"]),
        streams=values["streams"],
        backbones=values["backbones"],
        methods=values.get("methods", {}),
        is_published=values.get("published", False),
    )
