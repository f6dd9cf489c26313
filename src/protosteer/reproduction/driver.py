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
from protosteer.reproduction.results import Result, collect, format_csv, format_latex, format_markdown
from protosteer.reproduction.studies import run_study
from protosteer.reproduction.tuning import tune_missing
from protosteer.util.files import write_atomically
from protosteer.util.text import counted, suggestion

Say = Callable[[str], None]


def read_definitions(place: Place, name: str, scale: Scale) -> list[Definition]:
    """Read the definition of an experiment, or of all of the paper."""
    keys = names(place.definitions) if name == ALL else [name]
    definitions = [read_definition(place.definitions, key).at_scale(scale.name) for key in keys]
    return [definition for definition in definitions if name != ALL or definition.comparison is None]


def reproduce(
    definitions: Sequence[Definition],
    scale: Scale,
    place: Place,
    say: Say,
    run_options: Mapping[str, Any] | None = None,
    rows: Collection[str] = (),
) -> list[Result]:
    """Run unfinished runs and write the results of experiments.

    Finished runs are reused, interrupted ones are resumed. A run that fails leaves its cell empty, with the reason.
    The result of a comparison is written after every run.

    Args:
        definitions: The experiments.
        scale: The scale.
        place: Where runs and results are written to.
        say: Called with lines for the user.
        run_options: Further arguments of `run_several`, such as `engine`.
        rows: The keys of the rows to run; none: all.

    Returns:
        The results; each is written as NAME.md, .csv, .tex, .png and .json.
    """
    results = []
    for i, definition in enumerate(definitions, 1):
        runs = unique_runs(expand(definition, scale, place))
        count = sum(map(is_finished, runs))
        say(f"{definition.name}, {i} of {len(definitions)}: {counted(len(runs), 'run')}, {count} finished already")
        fill = functools.partial(run_study, place=place) if definition.study else functools.partial(_fill, place)
        failures: dict[Path, str] = {}
        for part, orders in split_work(definition, rows):
            tune_missing(expand(part, scale, place), place, say)
            cells = [replace(cell, runs=cell.runs[orders]) for cell in expand(part, scale, place)]
            open_runs = [run for run in unique_runs(cells) if not is_finished(run)]
            failures |= run_missing(open_runs, say, run_options or {})
            if open_runs and definition.comparison:
                write(fill(definition, scale, expand(definition, scale, place), failures), place.out)
        results.append(fill(definition, scale, expand(definition, scale, place), failures))
        write(results[-1], place.out)
        say(f"Written: {place.out / definition.name}.md, .csv, .tex, .png")
    return results


def split_work(definition: Definition, rows: Collection[str]) -> list[tuple[Definition, slice]]:
    """Divide an experiment into what is run before its result is written: all, rows, or single runs of a comparison.

    A comparison runs its class orders one after the other, and within each, its columns. So an interrupted one has
    numbers of every row.

    Returns:
        Pairs of a part of the definition, and which of each cell's runs to run.

    Raises:
        SettingsError: It has no such row (code "unknown-row").
    """
    row_keys = [row.key for row in definition.rows]
    for key in rows:
        if key not in row_keys:
            message = f"{definition.name} has no row '{key}'; {suggestion(key, row_keys)}"
            raise SettingsError(message, code="unknown-row", name=key)
    if not rows and definition.comparison is None:
        return [(definition, slice(None))]
    run_rows = [row for row in definition.rows if not rows or row.key in rows]
    if definition.comparison is None:
        return [(replace(definition, rows=(row,)), slice(None)) for row in run_rows]
    orders = [slice(i, i + 1) for i in range(len(definition.comparison.class_orders))]
    cells = [replace(definition, rows=(row,), columns=(column,)) for column in definition.columns for row in run_rows]
    return [(cell, order) for order in orders for cell in cells]


def run_missing(runs: Sequence[Experiment], say: Say, run_options: Mapping[str, Any]) -> dict[Path, str]:
    """Run unfinished runs, in groups that share stream and backbone; returns why runs failed, by folder."""
    failures: dict[Path, str] = {}
    for evaluates in (False, True):  # states are learned before they are evaluated
        groups: dict[tuple[Any, ...], list[Experiment]] = {}
        for run in runs:
            if (run.states_from is not None) == evaluates and run.states_from not in failures:
                groups.setdefault((run.stream, run.backbone, run.image_size, run.crop), []).append(run)
        for group in groups.values():
            failures |= _run_group(group, say, run_options)
    return failures


def _run_group(group: Sequence[Experiment], say: Say, run_options: Mapping[str, Any]) -> dict[Path, str]:
    plan = {str(run.folder): [run] for run in group}
    options = {"on_message": say, **run_options, "resume": True, "overwrite": False}
    try:
        outcome = run_several(plan, **options)
    except ProtosteerError as error:  # no data, no weights: the whole group
        return dict.fromkeys((run.folder for run in group), str(error))
    return {Path(folder): str(error) for folder, error in outcome.failed.items()}


def read_metrics(cell: Cell) -> dict[str, Any] | None:
    """Return the metrics of a cell's seeds and class orders, and the backbone's parameters; None if none is finished."""
    metrics: dict[str, Any] = {}
    for run in filter(is_finished, cell.runs):
        configuration, seeds = read_run(run.folder)
        run_seeds = [seed for seed in seeds if seed["seed"] in (run.seeds or ())]
        all_seeds = [*metrics.get("seeds", []), *run_seeds]
        metrics = {"seeds": all_seeds, "parameters": configuration["backbone"]["parameters"]}
    return metrics or None


def _fill(
    place: Place, definition: Definition, scale: Scale, cells: Sequence[Cell], failures: Mapping[Path, str]
) -> Result:
    """Fill the cells with the metrics of their runs."""
    metrics = {(cell.row.key, cell.column.key): read_metrics(cell) for cell in cells}
    cell_metrics = {key: values for key, values in metrics.items() if values}
    reasons, notes = {}, []
    for cell in cells:
        open_runs = [run for run in cell.runs if not is_finished(run)]
        if open_runs:
            part = f" ({len(open_runs)} of {len(cell.runs)} class orders)" if len(cell.runs) > 1 else ""
            reasons[cell.title] = failures.get(open_runs[0].folder, "not finished") + part
        settings = read_tuned(place, cell.tuning_run) if cell.tuning_run else {}
        if settings and (cell.row.key, cell.column.key) in cell_metrics:
            notes.append(f"{cell.title}: " + ", ".join(f"`{name}` {value}" for name, value in settings.items()))
    line_reasons = _explain_empty_lines(definition, cells, scale)
    return replace(collect(definition, scale, cells, cell_metrics, reasons | line_reasons), notes=notes)


def _explain_empty_lines(definition: Definition, cells: Sequence[Cell], scale: Scale) -> dict[str, str]:
    """Name rows and columns of which the scale has no run at all."""
    reasons = {}
    for part, lines in (("row", definition.rows), ("column", definition.columns)):
        for line in lines:
            line_cells = [cell for cell in cells if getattr(cell, part) == line]
            is_cited = line.is_cited or all(cell.row.is_cited for cell in line_cells)
            if not is_cited and not any(cell.run for cell in line_cells):
                reasons[line.title or definition.title] = f"scale {scale.name} has no data or backbone for it"
    return reasons


def write(result: Result, out: Path) -> None:
    """Write a result as NAME.md, .csv, .tex, .json and .png, and its further pictures."""
    name = result.definition.name
    header = {"experiment": name, "scale": result.scale.name, "missing": dict(result.missing)}
    numbers = [{**vars(number), "difference": number.difference} for number in result.numbers.values()]
    files = {
        f"{name}.md": format_markdown(result).encode(),
        f"{name}.csv": format_csv(result).encode(),
        f"{name}.tex": format_latex(result).encode(),
        f"{name}.json": (json.dumps({**header, "numbers": numbers}, indent=1) + "\n").encode(),
        **({f"{name}.png": PLOTS[result.definition.plot](result)} if f"{name}.png" not in result.pictures else {}),
        **result.pictures,
    }
    for file, content in files.items():
        write_atomically(out / file, content)
