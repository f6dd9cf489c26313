"""Commands that measure: `demo`, `run`, `compare`, `bench`."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from protosteer.cli import completion
from protosteer.cli.benchmark_options import ComputeOptions, ExperimentOptions, SplitOptions
from protosteer.cli.common import (
    CommandLineError,
    check_plot,
    command,
    make_console,
    print_json,
    say,
    show,
    sigterm_as_ctrl_c,
    write_output,
)
from protosteer.cli.loading import make_executor
from protosteer.cli.options import (
    Json,
    PrecisionName,
    Settings,
    Threads,
    Weights,
    Workers,
    command_line,
    in_flags,
    parse_settings,
)
from protosteer.cli.torchrun import output_path
from protosteer.util.text import one_line

if TYPE_CHECKING:
    from protosteer.evaluation.experiment import Experiment
    from protosteer.evaluation.sweep import Plan

PANEL = "Benchmarks"


@command(PANEL)
def demo(
    kind: Annotated[
        Literal["digits", "photos"] | None,
        Argument(metavar="digits|photos", help="What to learn (default: first digits, then photos)."),
    ] = None,
    folder: Annotated[
        Path | None,
        Argument(help="Your photos, a folder per class (default: details of two photos that scikit-learn ships)."),
    ] = None,
    out: Annotated[Path, Option(help="Folder for the model, the plots and the results.")] = Path("protosteer-demo"),
    backbone: Annotated[
        str | None, Option(autocompletion=completion.backbone_names, help="For photos: short name or timm name.")
    ] = None,
    weights: Weights = None,
    seed: Annotated[int, Option(min=0, help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn digits two at a time, then details of photos, and show what is forgotten; takes two or three minutes."""
    from protosteer.cli import demo

    log, console = make_console(stderr=True), make_console()
    if kind != "photos" and (folder or backbone or weights):
        message = "a folder, --backbone and --weights are for photos: protosteer demo photos"
        raise CommandLineError(message, code="conflicting-options")
    if kind is None:
        outcomes = demo.run_both(out, seed, log)
    elif kind == "digits":
        outcomes = [demo.run_demo(out, seed, log)]
    else:
        outcomes = [demo.run_photos(out, seed, log, folder, backbone, weights)]
    if as_json:
        figures, *photo_figures = (outcome.figures for outcome in outcomes)
        print_json(figures | ({"photos": photo_figures[0]} if photo_figures else {}))
    for outcome in outcomes:
        if not as_json:
            demo.show(outcome, console)
        demo.tell_files(outcome, log)
    if kind is None:
        for line in [*demo.plain_words(*outcomes), f"See it all in your browser: {out / demo.PAGE}"]:
            log.print(line, highlight=False, markup=False, soft_wrap=True)


@command(PANEL)
def run(
    *,
    experiment: ExperimentOptions,
    settings: Annotated[
        Literal["published"] | None, Option(help="Settings that the method's authors published for the benchmark.")
    ] = None,
    set_: Settings = None,
    config: Annotated[Path | None, Option(help="TOML file with any of these options and settings.")] = None,
    split: SplitOptions,
    computing: ComputeOptions,
    workers: Workers,
    logger: Annotated[
        Literal["tensorboard", "wandb", "mlflow"] | None, Option(help="Also log losses and metrics to this tracker.")
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            help="Run folder (default: runs/STREAM-METHOD-BACKBONE); of several methods, the folder that holds theirs."
        ),
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Resume the run in the folder.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Remove the run in the folder first.")] = False,
    as_json: Json = False,
) -> None:
    """Run a benchmark: learn its tasks one after the other, and test on all classes so far after each."""
    from protosteer.evaluation.experiment import overridden
    from protosteer.evaluation.sweep import names_several, plan_experiments
    from protosteer.settings import read_toml

    options = {**vars(experiment), **vars(split), **vars(computing), "out": out, "published": settings and True}
    flag_values = {name: value for name, value in options.items() if value is not None}
    values = overridden(read_toml(config) if config else {}, flag_values | parse_settings(set_ or []))
    run_arguments = {**run_options(workers, values.get("device", "auto"), resume, overwrite), "logger": logger}
    if names_several(values):
        report_plan(plan_experiments(values), run_arguments, as_json)
    else:
        _run_one(values, run_arguments, as_json)


def run_options(workers: Workers, device: str, resume: bool, overwrite: bool) -> dict[str, Any]:
    """Return the arguments of `run_experiment` that do not change results: executor, progress reporter, messages."""
    from protosteer.report.progress import RunProgress, SweepProgress

    log, executor = make_console(stderr=True), make_executor(workers, device)

    def reporter(stream: Any, runs: Any, note: Any) -> Any:
        return SweepProgress(log, note) if executor.is_remote else RunProgress(log, stream, runs, note)

    return {
        "resume": resume,
        "overwrite": overwrite,
        "command": command_line(),
        "make_reporter": reporter,
        "on_message": lambda line: say(in_flags(line)),
        "engine": executor,
    }


def _run_one(values: Mapping[str, Any], run_arguments: Mapping[str, Any], as_json: bool) -> None:
    from protosteer.evaluation.experiment import Experiment, run_experiment
    from protosteer.report.tables import run_report

    experiment = _on_this_rank(Experiment.from_values(values))
    with _say_how_to_resume(experiment.folder):
        figures = run_experiment(experiment, **run_arguments)
    if as_json:
        print_json(figures)
    else:
        show(run_report(figures))
    say(f"Written: {experiment.folder}")


def _on_this_rank(experiment: Experiment) -> Experiment:
    from protosteer.evaluation.run_folder import MANIFEST

    out = output_path(experiment.folder, lambda folder: (folder / MANIFEST).is_file())
    return dataclasses.replace(experiment, out=out)


def report_plan(plan: Plan, run_arguments: Mapping[str, Any], as_json: bool) -> None:
    """Run planned experiments and print the table that compares them, or JSON."""
    from protosteer.evaluation.sweep import run_several
    from protosteer.report.compare import comparison_tables

    plan = {label: [_on_this_rank(experiment) for experiment in experiments] for label, experiments in plan.items()}
    folders = [experiment.folder for experiments in plan.values() for experiment in experiments]
    place = Path(os.path.commonpath([folder.parent for folder in folders]))
    with _say_how_to_resume(place):
        outcome = run_several(plan, **run_arguments)
    if as_json:
        # One row has the form of one run: its class orders are beside its seeds.
        print_json(outcome.figures if len(plan) > 1 else next(iter(outcome.figures.values()), {}))
    elif outcome.figures:
        show(comparison_tables({name: figures["seeds"] for name, figures in outcome.figures.items()}))
    if outcome.figures:
        say(f"Written: {folders[0]}" if len(folders) == 1 else f"Written: {len(folders)} run folders in {place}")
    for label, error in outcome.failed.items():
        say(f"error: method {label}: {one_line(in_flags(str(error)))}")
    if outcome.failed:
        raise typer.Exit(1)


@command(PANEL)
def bench(
    subjects: Annotated[
        list[str] | None, Argument(metavar="SUBJECT", help="prediction, training, bf16 or scaling (default: all).")
    ] = None,
    repeats: Annotated[int, Option(min=1, help="Interleaved repeats; medians are reported.")] = 5,
    precision: Annotated[
        PrecisionName,
        Option(help="fp32 skips the subject bf16; auto skips it on processors without such instructions."),
    ] = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure speed as ratios within one run, against the limit and the naive way; takes minutes."""
    import torch

    from protosteer.bench.report import as_json as figures
    from protosteer.bench.report import run_all, table

    if threads is not None:
        torch.set_num_threads(threads)
    ratios, reasons = run_all(subjects or None, repeats, say, precision)
    if as_json:
        print_json(figures(ratios, reasons))
    else:
        show(table(ratios))


@contextmanager
def _say_how_to_resume(folder: Path) -> Iterator[None]:
    """Print how to resume if Ctrl-C or SIGTERM ends the run in this block."""
    try:
        with sigterm_as_ctrl_c():
            yield
    except KeyboardInterrupt:
        words = [word for word in command_line() if word not in ("--resume", "--overwrite")]
        say(f"stopped; {folder} keeps what was done. To resume: {shlex.join([*words, '--resume'])}")
        raise


@command(PANEL)
def compare(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="Folders of runs, or LABEL=FOLDER.")],
    markdown: Annotated[bool, Option("--markdown", help="Print Markdown.")] = False,
    latex: Annotated[bool, Option("--latex", help="Print LaTeX, for the package booktabs.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV: mean and standard deviation of every metric.")] = False,
    as_json: Json = False,
    test: Annotated[
        bool, Option("--test", help="Add confidence intervals, and tests of every row against the first.")
    ] = False,
    plot: Annotated[Path | None, Option(help="PNG file for the accuracy after each task.")] = None,
    reliability: Annotated[
        Path | None, Option(help="PNG file for accuracy against confidence, for methods that report it.")
    ] = None,
    pareto: Annotated[
        Path | None, Option(help="PNG file for accuracy against memory, training time and forward passes per image.")
    ] = None,
) -> None:
    """Compare finished runs: one row per configuration, mean and deviation over its class orders and seeds."""
    from protosteer.evaluation.comparison import bins_of, gather
    from protosteer.evaluation.metrics import over_seeds
    from protosteer.evaluation.significance import compare_with_first
    from protosteer.report import compare as report
    from protosteer.report.pareto import pareto_plot
    from protosteer.report.plots import accuracy_bands
    from protosteer.report.reliability import reliability_plot

    if markdown + latex + as_csv + as_json > 1:
        raise CommandLineError("choose one of --markdown, --latex, --csv and --json", code="conflicting-options")
    for picture in (plot, reliability, pareto):
        check_plot(picture)
    rows = gather(runs)
    tests = compare_with_first(rows) if test else {}
    if as_json:
        spreads = {label: over_seeds(seeds) for label, seeds in rows.items()}
        summaries = {k: {"mean": m, "std": s, "n": len(rows[k]), "seeds": rows[k]} for k, (m, s) in spreads.items()}
        print_json({k: {**row, "test": tests[k]} if test else row for k, row in summaries.items()})
    elif as_csv:
        print(report.comparison_csv(rows, tests), end="")
    elif markdown:
        print(report.comparison_markdown(rows, tests), end="")
    elif latex:
        print(report.comparison_latex(rows, tests), end="")
    else:
        show([*report.comparison_tables(rows), *([report.comparison_tests(tests)] if test else [])])
    if plot:
        matrices = {label: [seed["matrix"] for seed in seeds] for label, seeds in rows.items()}
        write_output(plot, accuracy_bands(matrices), "--plot")
    if reliability:
        write_output(reliability, reliability_plot(bins_of(rows)), "--reliability")
    if pareto:
        write_output(pareto, pareto_plot(rows), "--pareto")
