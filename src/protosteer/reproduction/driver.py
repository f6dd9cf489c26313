"""Run experiments at a scale and write their results."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protosteer.errors import ProtosteerError, SettingsError
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.run_folder import read_run
from protosteer.evaluation.sweep import run_several
from protosteer.reproduction.definition import ALL, Definition, Scale, names, read_definition
from protosteer.reproduction.grid import Cell, Place, expand, is_finished, read_tuned, unique_runs
from protosteer.reproduction.plots import PLOTS
from protosteer.reproduction.results import Result, as_csv, as_latex, as_markdown, collect
from protosteer.reproduction.studies import run_study
from protosteer.reproduction.tuning import tune_missing
from protosteer.util.files import write_atomically
from protosteer.util.text import counted, suggestion

Say = Callable[[str], None]


def chosen(place: Place, name: str, scale: Scale) -> list[Definition]:
    """Read the definition of an experiment, or of all of the paper."""
    wanted = names(place.definitions) if name == ALL else [name]
    read = [read_definition(place.definitions, one).at(scale.name) for one in wanted]
    return [one for one in read if name != ALL or one.comparison is None]


def reproduce(
    definitions: Sequence[Definition],
    scale: Scale,
    place: Place,
    say: Say,
    how: Mapping[str, Any] | None = None,
    rows: Collection[str] = (),
) -> list[Result]:
    """Run what is missing and write the results of experiments.

    Finished runs are reused, interrupted ones are resumed. A run that fails leaves its cell empty, with the reason.
    The result of a comparison is written after every run.

    Args:
        definitions: The experiments.
        scale: The scale.
        place: Where runs and results are written to.
        say: Called with lines for the user.
        how: Further arguments of `run_several`, such as `engine`.
        rows: The keys of the rows to run; none: all.

    Returns:
        The results; each is written as NAME.md, .csv, .tex, .png and .json.
    """
    results = []
    for i, definition in enumerate(definitions, 1):
        runs = unique_runs(expand(definition, scale, place))
        finished = sum(map(is_finished, runs))
        say(f"{definition.name}, {i} of {len(definitions)}: {counted(len(runs), 'run')}, {finished} finished already")
        fill = functools.partial(run_study, place=place) if definition.study else functools.partial(_fill, place)
        failed: dict[Path, str] = {}
        for part, orders in parts(definition, rows):
            tune_missing(expand(part, scale, place), place, say)
            cells = [replace(cell, runs=cell.runs[orders]) for cell in expand(part, scale, place)]
            missing = [run for run in unique_runs(cells) if not is_finished(run)]
            failed |= run_missing(missing, say, how or {})
            if missing and definition.comparison:
                write(fill(definition, scale, expand(definition, scale, place), failed), place.out)
        results.append(fill(definition, scale, expand(definition, scale, place), failed))
        write(results[-1], place.out)
        say(f"Written: {place.out / definition.name}.md, .csv, .tex, .png")
    return results


def parts(definition: Definition, rows: Collection[str]) -> list[tuple[Definition, slice]]:
    """Divide an experiment into what is run before its result is written: all, rows, or single runs of a comparison.

    A comparison runs all cells with its first class order before the second, and its first column before the second:
    interrupted, it has something of every row.

    Returns:
        Pairs of a part of the definition, and which of each cell's runs to run.

    Raises:
        SettingsError: It has no such row (code "unknown-row").
    """
    known = [row.key for row in definition.rows]
    for key in rows:
        if key not in known:
            message = f"{definition.name} has no row '{key}'; {suggestion(key, known)}"
            raise SettingsError(message, code="unknown-row", name=key)
    if not rows and definition.comparison is None:
        return [(definition, slice(None))]
    chosen = [row for row in definition.rows if not rows or row.key in rows]
    if definition.comparison is None:
        return [(replace(definition, rows=(row,)), slice(None)) for row in chosen]
    orders = [slice(i, i + 1) for i in range(len(definition.comparison.class_orders))]
    cells = [replace(definition, rows=(row,), columns=(column,)) for column in definition.columns for row in chosen]
    return [(cell, order) for order in orders for cell in cells]


def run_missing(runs: Sequence[Experiment], say: Say, how: Mapping[str, Any]) -> dict[Path, str]:
    """Run unfinished runs, in groups that share stream and backbone; returns why runs failed, by folder."""
    failed: dict[Path, str] = {}
    for evaluates in (False, True):  # states are learned before they are evaluated
        groups: dict[tuple[Any, ...], list[Experiment]] = {}
        for run in runs:
            if (run.states_from is not None) == evaluates and run.states_from not in failed:
                groups.setdefault((run.stream, run.backbone, run.image_size, run.crop), []).append(run)
        for group in groups.values():
            failed |= _run_group(group, say, how)
    return failed


def _run_group(group: Sequence[Experiment], say: Say, how: Mapping[str, Any]) -> dict[Path, str]:
    plan = {str(run.folder): [run] for run in group}
    options = {"on_message": say, **how, "resume": True, "overwrite": False}
    try:
        outcome = run_several(plan, **options)
    except ProtosteerError as error:  # no data, no weights: the whole group
        return dict.fromkeys((run.folder for run in group), str(error))
    return {Path(folder): str(error) for folder, error in outcome.failed.items()}


def read_figures(cell: Cell) -> dict[str, Any] | None:
    """Return the metrics of a cell's seeds and class orders, and the backbone's parameters; None if none is finished."""
    found: dict[str, Any] = {}
    for run in filter(is_finished, cell.runs):
        configuration, seeds = read_run(run.folder)
        wanted = [seed for seed in seeds if seed["seed"] in (run.seeds or ())]
        found = {
            "seeds": [*found.get("seeds", []), *wanted],
            "parameters": configuration["backbone"]["parameters"],
        }
    return found or None


def _fill(
    place: Place, definition: Definition, scale: Scale, cells: Sequence[Cell], failed: Mapping[Path, str]
) -> Result:
    """Fill the cells with the metrics of their runs."""
    figures = {(cell.row.key, cell.column.key): read_figures(cell) for cell in cells}
    known = {where: found for where, found in figures.items() if found}
    missing, notes = {}, []
    for cell in cells:
        unfinished = [run for run in cell.runs if not is_finished(run)]
        if unfinished:
            part = f" ({len(unfinished)} of {len(cell.runs)} class orders)" if len(cell.runs) > 1 else ""
            missing[cell.title] = failed.get(unfinished[0].folder, "not finished") + part
        best = read_tuned(place, cell.untuned) if cell.untuned else {}
        if best and (cell.row.key, cell.column.key) in known:
            notes.append(f"{cell.title}: " + ", ".join(f"`{name}` {value}" for name, value in best.items()))
    absent = _absent(definition, cells, scale)
    return replace(collect(definition, scale, cells, known, missing | absent), notes=notes)


def _absent(definition: Definition, cells: Sequence[Cell], scale: Scale) -> dict[str, str]:
    """Name rows and columns of which the scale has no run at all."""
    found = {}
    for part, lines in (("row", definition.rows), ("column", definition.columns)):
        for line in lines:
            own = [cell for cell in cells if getattr(cell, part) == line]
            if not line.is_cited and not any(cell.run for cell in own) and not all(c.row.is_cited for c in own):
                found[line.title or definition.title] = f"scale {scale.name} has no data or backbone for it"
    return found


def write(result: Result, out: Path) -> None:
    """Write a result as NAME.md, .csv, .tex, .json and .png, and its further pictures."""
    name = result.definition.name
    figures = {"experiment": name, "scale": result.scale.name, "missing": dict(result.missing)}
    numbers = [{**vars(number), "difference": number.difference} for number in result.numbers.values()]
    files = {
        f"{name}.md": as_markdown(result).encode(),
        f"{name}.csv": as_csv(result).encode(),
        f"{name}.tex": as_latex(result).encode(),
        f"{name}.json": (json.dumps({**figures, "numbers": numbers}, indent=1) + "\n").encode(),
        **({f"{name}.png": PLOTS[result.definition.plot](result)} if f"{name}.png" not in result.pictures else {}),
        **result.pictures,
    }
    for file, content in files.items():
        write_atomically(out / file, content)
