"""Expand an experiment's definition into runs at one scale: equal runs share one folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from protosteer.backbones.precision import FP32
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.run_folder import RunFolder
from protosteer.methods import find_method
from protosteer.reproduction.definition import Definition, Line, Scale
from protosteer.streams import StreamOptions, find_benchmark

RUNS = "runs"
ALL_METHODS = "all"  # in a scale: settings of every method that has them


@dataclass(frozen=True)
class Place:
    """Where runs are written to, and where their data comes from; it does not change results.

    Attributes:
        out: The folder for runs and results of the scale.
        definitions: The folder of definitions; task files are found there.
        data_dir: Where data sets are; None: the default folder.
        device: The device.
        threads: The number of CPU threads; None: torch's choice.
    """

    out: Path
    definitions: Path
    data_dir: Path | None = None
    device: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Cell:
    """One row and column of an experiment, with its run; None if the scale has none for it."""

    row: Line
    column: Line
    run: Experiment | None


def expand(definition: Definition, scale: Scale, place: Place) -> list[Cell]:
    """Expand a definition into its cells, row by row; see `Definition.at`."""
    return [Cell(row, column, _run(definition, scale, place, row, column)) for row, column in _pairs(definition)]


def _pairs(definition: Definition) -> Iterator[tuple[Line, Line]]:
    return ((row, column) for row in definition.rows for column in definition.columns)


def _run(definition: Definition, scale: Scale, place: Place, row: Line, column: Line) -> Experiment | None:
    changed = {"method": "cpp", "backbone": "main", **definition.values, **column.values, **row.values}
    stream, backbone = scale.streams.get(changed.pop("stream", "")), scale.backbones.get(changed.pop("backbone"))
    if row.is_cited or column.is_cited or stream is None or backbone is None:
        return None
    method = changed["method"]
    general = _for_method(method, {**stream, **scale.methods.get(ALL_METHODS, {})})
    values: dict[str, Any] = {**general, **backbone, **scale.methods.get(method, {}), **changed}
    if scale.is_published and find_benchmark(values["stream"]).name in find_method(method).published:
        values["published"] = True
    if "task_file" in values:
        values["task_file"] = str(place.definitions / values["task_file"])
    values |= {"seeds": list(scale.seeds), "precision": FP32, "device": place.device}
    values |= {name: value for name, value in (("data_dir", place.data_dir), ("threads", place.threads)) if value}
    made = Experiment.from_values(values)
    if column.learned_in:
        source = next(line for line in definition.columns if line.key == column.learned_in)
        learned = _run(definition, scale, place, row, source)
        made = dataclasses.replace(made, states_from=learned.folder if learned else None)
    return dataclasses.replace(made, out=place.out / RUNS / _folder_name(made))


def _for_method(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the settings that a method does not have, such as the size of a buffer."""
    run = {*Experiment.hints(), *get_type_hints(StreamOptions)}
    known = run | {field.name for field in dataclasses.fields(find_method(method).settings_class)}
    return {name: value for name, value in values.items() if name in known}


def _folder_name(run: Experiment) -> str:
    """Name a run's folder by stream, method, backbone and a hash of all that determines its results."""
    about = {
        "settings": run.settings_for(0).to_dict(),
        "options": run.options.to_dict(),
        "run": [run.stream, run.method, run.backbone, run.image_size, run.crop, run.precision],
        "states_from": run.states_from.name if run.states_from else None,
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return "-".join([find_benchmark(run.stream).name, run.method, run.backbone.split(".")[0], digest])


def unique_runs(cells: list[Cell]) -> list[Experiment]:
    """Return every run once, those that evaluate another's states last; what they evaluate is among them."""
    found: dict[Path, Experiment] = {}
    for run in (cell.run for cell in cells if cell.run):
        found.setdefault(run.folder, run)
    return sorted(found.values(), key=lambda run: run.states_from is not None)


def is_finished(run: Experiment) -> bool:
    """Return whether every seed of a run is finished."""
    return RunFolder(run.folder).finished(*(run.seeds or ()))
