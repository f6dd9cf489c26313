"""Commands around runs: `evaluate-run`, `tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from protosteer.cli import completion
from protosteer.cli.benchmark_options import STREAMS, Base, DataDir, Increment, RunBackbone, Sweep, TrainPerClass
from protosteer.cli.benchmarks import PANEL, report_plan, run_options
from protosteer.cli.common import command, print_json, say, show, write_output
from protosteer.cli.options import Device, Json, Settings, Threads, Weights, Workers, parse_settings


@command(PANEL, "evaluate-run")
def evaluate_run(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run, or of several.")],
    set_: Settings = None,
    sweep: Sweep = None,
    stream: Annotated[str | None, Option(help="The stream, for a run on folder:PATH or path/to/file.py:NAME.")] = None,
    method: Annotated[
        str | None, Option(metavar="FILE.py:CLASS", help="The method, for a run of one from a file.")
    ] = None,
    weights: Weights = None,
    data_dir: Annotated[Path | None, Option(help="Where data sets are.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    *,
    workers: Workers,
    out: Annotated[Path | None, Option(help="New run folder (default: beside RUN, named by the settings).")] = None,
    resume: Annotated[bool, Option("--resume", help="Resume the run in the new folder.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Remove the run in the new folder first.")] = False,
    as_json: Json = False,
) -> None:
    """Evaluate a finished run again under other settings, from its stored states: nothing is learned.

    For settings that act in prediction, such as neighbours. One that acts in training has no effect: `compare` names the
    value that the run learned with, too.
    """
    flags = {
        "sweep": sweep, "stream": stream, "method": method, "weights": weights, "data_dir": data_dir,
        "threads": threads, "out": out,
    }  # fmt: skip
    values = {name: value for name, value in flags.items() if value is not None}

    from protosteer.evaluation.reevaluation import plan_reevaluation

    plan = plan_reevaluation(run, {**values, "device": device, **parse_settings(set_ or [])})
    report_plan(plan, run_options(workers, device, resume, overwrite), as_json)


@command(PANEL)
def tune(
    method: Annotated[str, Argument(autocompletion=completion.method_names, help="The method.")],
    stream: Annotated[str, Argument(help=STREAMS, autocompletion=completion.stream_names)],
    backbone: RunBackbone = None,
    weights: Weights = None,
    grid: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE,...", help="Values to try instead of the method's grid; repeatable."),
    ] = None,
    set_: Settings = None,
    seeds: Annotated[str | None, Option(help="Seeds to average over, such as 0,1 (default: 0).")] = None,
    validation: Annotated[float, Option(help="Share of the first task's training images to validate on.")] = 0.2,
    tasks: Annotated[int | None, Option(help="Number of tasks of the benchmark.")] = None,
    base: Base = None,
    increment: Increment = None,
    class_order: Annotated[str | None, Option(metavar="natural|seed:N|FILE", help="Order of the classes.")] = None,
    train_per_class: TrainPerClass = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    threads: Threads = None,
    out: Annotated[Path | None, Option(help="TOML file for the best settings, for run --config.")] = None,
    as_json: Json = False,
) -> None:
    """Tune a method: try its small grid on validation images of the first task alone, the same way for all methods."""
    flags = {name: value for name, value in locals().items() if value is not None}
    for name in ("grid", "set_", "out", "as_json"):
        flags.pop(name, None)

    from protosteer.evaluation.experiment import Experiment
    from protosteer.evaluation.sweep import parse_sweep
    from protosteer.evaluation.tuning import tune as search
    from protosteer.report.tables import trials_table

    def on_trial(i: int, trials: int, trial: Any) -> None:
        say(f"trial {i} of {trials}: {trial.accuracy:.2f} %")

    experiment = Experiment.from_values(flags | parse_settings(set_ or []))
    trials = search(experiment, parse_sweep(grid) if grid else None, on_trial)
    best_settings = dict(trials[0].settings)
    if out:
        write_output(out, "".join(f"{name} = {json.dumps(v)}\n" for name, v in best_settings.items()).encode(), "--out")
    if as_json:
        trial_rows = [{"settings": dict(trial.settings), "accuracy": trial.accuracy} for trial in trials]
        print_json({"method": method, "stream": stream, "best": best_settings, "trials": trial_rows})
    else:
        show([trials_table(trials)])
    say("To use the best: " + " ".join(f"--set {name}={value}" for name, value in best_settings.items()))
