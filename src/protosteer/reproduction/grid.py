"""Expand an experiment's definition into runs at one scale: equal runs share one folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from protosteer.backbones.precision import FP32
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.run_folder import RunFolder
from protosteer.methods import find_method
from protosteer.reproduction.definition import Definition, Line, Scale
from protosteer.streams import StreamOptions, find_benchmark
from protosteer.streams.options import SEED

RUNS, TUNED = "runs", "tuned"
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
    """One row and column of an experiment, with its runs, one for each class order; none if the scale has none for it.

    `tuning_run` is the run that tunes the settings, if they are tuned.
    """

    row: Line
    column: Line
    runs: tuple[Experiment, ...]
    tuning_run: Experiment | None = None

    @property
    def run(self) -> Experiment | None:
        """The first run."""
        return self.runs[0] if self.runs else None

    @property
    def title(self) -> str:
        """The titles of row and column."""
        return ", ".join(part for part in (self.row.title, self.column.title) if part)


def expand(definition: Definition, scale: Scale, place: Place) -> list[Cell]:
    """Expand a definition into its cells, row by row; see `Definition.at_scale`."""
    return [_expand(definition, scale, place, row, column) for row in definition.rows for column in definition.columns]


def _expand(definition: Definition, scale: Scale, place: Place, row: Line, column: Line) -> Cell:
    run, comparison = _plan_run(definition, scale, place, row, column), definition.comparison
    if run is None or comparison is None:
        return Cell(row, column, (run,) if run else ())
    orders = [dataclasses.replace(run.options, class_order=f"{SEED}{order}") for order in comparison.class_orders]
    runs = [_place_run(dataclasses.replace(run, options=options), place) for options in orders]
    if not comparison.is_tuned:
        return Cell(row, column, tuple(runs))
    tuning_run = runs[0]
    settings = read_tuned(place, tuning_run)
    runs = [dataclasses.replace(run, settings={**run.settings, **settings}) for run in runs]
    return Cell(row, column, tuple(_place_run(run, place) for run in runs), tuning_run)


def tuned_file(place: Place, tuning_run: Experiment) -> Path:
    """Return the file of the settings that were chosen for a run."""
    return place.out / TUNED / f"{tuning_run.folder.name}.json"


def read_tuned(place: Place, tuning_run: Experiment) -> dict[str, Any]:
    """Return the settings that were chosen for a run; {} before that."""
    file = tuned_file(place, tuning_run)
    return dict(json.loads(file.read_text())["best"]) if file.is_file() else {}


def _plan_run(definition: Definition, scale: Scale, place: Place, row: Line, column: Line) -> Experiment | None:
    line_values = {"method": "cpp", "backbone": "main", **definition.values, **column.values, **row.values}
    stream = scale.streams.get(line_values.pop("stream", ""))
    backbone = scale.backbones.get(line_values.pop("backbone"))
    if row.is_cited or column.is_cited or stream is None or backbone is None:
        return None
    method, comparison = line_values["method"], definition.comparison
    methods = scale.methods if comparison is None else {}
    scale_settings = _select_settings(method, {**stream, **methods.get(ALL_METHODS, {})})
    values: dict[str, Any] = {**scale_settings, **backbone, **methods.get(method, {}), **line_values}
    if scale.is_published and find_benchmark(values["stream"]).name in find_method(method).published:
        values["published"] = True
    if "task_file" in values:
        values["task_file"] = str(place.definitions / values["task_file"])
    seeds, precision = (comparison.seeds, comparison.precision) if comparison else (scale.seeds, FP32)
    values |= {"seeds": list(seeds), "precision": precision, "device": place.device}
    values |= {name: value for name, value in (("data_dir", place.data_dir), ("threads", place.threads)) if value}
    run = Experiment.from_values(values)
    if comparison:
        run = dataclasses.replace(run, settings={**run.settings, **_reduce_settings(run, comparison.at_most)})
    if column.learned_in:
        source = next(line for line in definition.columns if line.key == column.learned_in)
        source_run = _plan_run(definition, scale, place, row, source)
        run = dataclasses.replace(run, states_from=source_run.folder if source_run else None)
    return _place_run(run, place)


def _place_run(run: Experiment, place: Place) -> Experiment:
    return dataclasses.replace(run, out=place.out / RUNS / _name_folder(run))


def _reduce_settings(run: Experiment, at_most: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings that are above their caps, reduced; 0 stands for a default of unknown size."""
    values = run.settings_for(0).to_dict()
    return {name: cap for name, cap in at_most.items() if name in values and not 0 < values[name] <= cap}


def _select_settings(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the settings that a method does not have, such as the size of a buffer."""
    run_names = {*Experiment.hints(), *get_type_hints(StreamOptions)}
    known_names = run_names | {field.name for field in dataclasses.fields(find_method(method).settings_class)}
    return {name: value for name, value in values.items() if name in known_names}


def _name_folder(run: Experiment) -> str:
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
    runs: dict[Path, Experiment] = {}
    for run in (run for cell in cells for run in cell.runs):
        runs.setdefault(run.folder, run)
    return sorted(runs.values(), key=lambda run: run.states_from is not None)


def is_finished(run: Experiment) -> bool:
    """Return whether every seed of a run is finished."""
    return RunFolder(run.folder).finished(*(run.seeds or ()))
