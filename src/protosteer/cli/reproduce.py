"""`protosteer reproduce`: the paper's tables and figures, and comparisons of methods."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from protosteer.cli import completion
from protosteer.cli.benchmark_options import DataDir
from protosteer.cli.benchmarks import PANEL, run_options
from protosteer.cli.common import command, print_json, say, show, sigterm_as_ctrl_c
from protosteer.cli.options import Device, Json, Threads, Workers, command_line, in_flags

if TYPE_CHECKING:
    from protosteer.evaluation.experiment import Experiment
    from protosteer.reproduction.results import Result


@command(PANEL)
def reproduce(
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME|all",
            autocompletion=completion.paper_experiments,
            help="The experiment; without a name, all are listed.",
        ),
    ] = None,
    scale: Annotated[
        str,
        Option(
            metavar="paper|small|mini",
            help="paper: the full configuration, for a GPU. small: DeiT-Tiny on reduced CIFAR-100. mini: digits on the "
            "shipped backbone nano.",
        ),
    ] = "mini",
    rows: Annotated[
        str | None, Option(metavar="ROW,...", help="Keys of the rows to run, such as cpp,joint (default: all).")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List the runs and estimate their time; run nothing.")] = False,
    data_dir: DataDir = None,
    device: Device = "auto",
    threads: Threads = None,
    *,
    workers: Workers,
    out: Annotated[Path, Option(help="Folder for runs and results; each scale has its own folder in it.")] = Path(
        "runs/paper"
    ),
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper: the paper's numbers beside ours. Or run a comparison of methods.

    Finished runs are reused, and interrupted ones resume, when the command is repeated. Written for each experiment:
    Markdown, CSV, LaTeX, JSON and a plot.
    """
    from protosteer.reproduction import driver
    from protosteer.reproduction.definition import catalogue, read_definition, read_scale
    from protosteer.reproduction.definition import names as experiment_names
    from protosteer.reproduction.grid import Place, expand, unique_runs
    from protosteer.reproduction.tables import experiments_table, result_tables

    folder = catalogue()
    if name is None:
        show([experiments_table([read_definition(folder, definition) for definition in experiment_names(folder)])])
        return
    chosen_scale = read_scale(folder, scale)
    place = Place(out / scale, folder, data_dir, device, threads)
    definitions = driver.read_definitions(place, name, chosen_scale)
    row_keys = rows.split(",") if rows else ()
    if dry_run:
        parts = [part for definition in definitions for part, _ in driver.split_work(definition, row_keys)]
        runs = unique_runs([cell for part in parts for cell in expand(part, chosen_scale, place)])
        _show_costs(runs, f"Scale {scale}: {chosen_scale.title}", as_json)
        return
    run_arguments = run_options(workers, device, resume=True, overwrite=False)
    del run_arguments["on_message"]  # `_tell` takes its place
    try:
        with sigterm_as_ctrl_c():
            results = driver.reproduce(definitions, chosen_scale, place, _tell, run_arguments, row_keys)
    except KeyboardInterrupt:
        say(f"stopped; {place.out} keeps what was done. To resume: {shlex.join(command_line())}")
        raise
    if as_json:
        keys = [result.definition.name for result in results]
        print_json({key: json.loads((place.out / f"{key}.json").read_text()) for key in keys})
    else:
        show([table for result in results for table in result_tables(result)])
    _report_missing(results)


def _report_missing(results: Sequence[Result]) -> None:
    """Name the runs that failed; the exit code is 1 if there is no number at all."""
    for cell, reason in {cell: reason for result in results for cell, reason in result.missing.items()}.items():
        say(f"not run: {cell}: {in_flags(reason)}")
    if not any(number.mean is not None for result in results for number in result.numbers.values()):
        raise Exit(1)


def _tell(line: str) -> None:
    """Print a message, unless it says that a run begins: here every run may be resumed."""
    if not line.endswith("starting a new one"):
        say(in_flags(line))


def _show_costs(runs: list[Experiment], title: str, as_json: bool) -> None:
    from protosteer.reproduction.cost import Stopwatch, estimate
    from protosteer.reproduction.tables import cost_table, format_duration

    stopwatch = Stopwatch()
    costs = [estimate(run, stopwatch) for run in runs]
    total = sum(cost.seconds for cost in costs)
    if as_json:
        lines = [{**vars(cost), "run": cost.run.folder.name, "seeds": list(cost.run.seeds or ())} for cost in costs]
        print_json({"seconds": total, "runs": lines})
        return
    show([cost_table(costs, title)])
    say(f"about {format_duration(total)} on this machine, in one process; timed on a few images per backbone")
