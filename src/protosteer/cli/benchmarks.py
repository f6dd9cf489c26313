"""Commands that measure: the demo, runs through a stream, their comparison, speed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from protosteer.cli.common import Json, app, check_plot, make_console, polite_kill, say, write_plot
from protosteer.cli.words import command_line, parse_settings

PANEL = "Benchmarks"


@app.command(rich_help_panel=PANEL)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model, the plots and the figures.")] = Path(
        "protosteer-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn the ten digits two at a time, in four variants, and show what is forgotten. About a minute."""
    from protosteer.cli.demo import run_demo, show, tell_files

    log = make_console(stderr=True)
    outcome = run_demo(out, seed, log)
    if as_json:
        print(json.dumps(outcome.figures, indent=2))
    else:
        show(outcome, make_console())
    tell_files(outcome, log)


@app.command(rich_help_panel=PANEL)
def run(
    stream: Annotated[
        str | None,
        typer.Argument(
            help=(
                "split-cifar100, five-datasets, imagenet-subset, imagenet-r, cub200, split-digits or "
                "folder:PATH."
            )
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="cpp (the default) or ncm, its training-free baseline.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Short name, or a name of timm's (default: nano).")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="File with the backbone's weights.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Image size to run the backbone at.")] = None,
    crop: Annotated[
        float | None, typer.Option(help="Share kept by the centre crop, if not the stream's own.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, such as 0,1,2 (default: 0, or the resumed run's).")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="paper|fast", help="Settings of the paper (the default), or quicker ones."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method; repeatable."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with any of these names and settings.")
    ] = None,
    class_order: Annotated[
        str | None, typer.Option(metavar="natural|seed:N|FILE", help="Order in which classes are met.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks, as equal in size as possible.")] = None,
    base: Annotated[int | None, typer.Option(help="Classes of the first task, with --increment.")] = None,
    increment: Annotated[int | None, typer.Option(help="Classes of every further task.")] = None,
    task_file: Annotated[Path | None, typer.Option(help="File with the classes of each task.")] = None,
    train_per_class: Annotated[int | None, typer.Option(help="At most so many, in file order.")] = None,
    test_per_class: Annotated[int | None, typer.Option(help="At most so many, in file order.")] = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Judge by this share of the training images instead of the test images."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are, or are downloaded to.")] = None,
    skip_unreadable: Annotated[
        bool | None, typer.Option("--skip-unreadable", help="Leave images out that cannot be read.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto (the default), cpu, cuda or mps.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="auto|fp32|bf16", help="Of the backbone; auto is bf16 on CUDA and fp32 elsewhere."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the processor.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: runs/STREAM-METHOD-BACKBONE).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the run in the folder first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a benchmark: learn its tasks one after the other, test on all classes so far after each."""
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("set_", "config", "resume", "overwrite", "as_json"):
        given.pop(name, None)

    from protosteer.evaluation.experiment import Experiment, overridden, run_experiment
    from protosteer.report.progress import RunProgress
    from protosteer.report.tables import run_report
    from protosteer.settings import read_toml

    values = overridden(read_toml(config) if config else {}, given | parse_settings(set_ or []))
    experiment = Experiment.from_values(values)
    log = make_console(stderr=True)
    with _interruptible(experiment.folder):
        figures = run_experiment(
            experiment,
            resume=resume,
            overwrite=overwrite,
            command=command_line(),
            make_reporter=lambda stream, runs, note: RunProgress(log, stream, runs, note),
            on_message=say,
        )
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        console = make_console()
        for part in run_report(figures):
            console.print(part)
    say(f"Written: {experiment.folder}")


@app.command(rich_help_panel=PANEL)
def bench(
    subjects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SUBJECT",
            help="Of prediction, training, matrix, scaling, service.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats; medians are reported.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the processor.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed, as ratios within one run: against the hardware's limit and the naive way. Some minutes."""
    import torch

    from protosteer.bench.report import as_json as figures
    from protosteer.bench.report import run_all, table

    if threads is not None:
        torch.set_num_threads(threads)
    ratios = run_all(subjects or None, repeats, say)
    if as_json:
        print(json.dumps(figures(ratios), indent=1))
        return
    console = make_console()
    for part in table(ratios):
        console.print(part)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C and a polite kill end a run in the same way, and it can go on."""
    try:
        with polite_kill():
            yield
    except KeyboardInterrupt:
        words = [word for word in command_line() if word not in ("--resume", "--overwrite")]
        say(f"stopped; {folder} keeps what was done. Go on with: {shlex.join([*words, '--resume'])}")
        raise


@app.command(rich_help_panel=PANEL)
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or LABEL=FOLDER.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV: mean and deviation of every figure.")
    ] = False,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the accuracy after each task.")] = None,
) -> None:
    """Compare finished runs: one row per configuration, mean and standard deviation over its seeds."""
    from protosteer.evaluation.comparison import gather
    from protosteer.evaluation.metrics import over_seeds
    from protosteer.report import compare as report
    from protosteer.report.plots import accuracy_bands

    if markdown + as_csv + as_json > 1:
        raise typer.BadParameter("choose one of --markdown, --csv and --json")
    check_plot(plot)
    rows = gather(runs)
    if as_json:
        summaries = {
            label: dict(zip(("mean", "std"), over_seeds(seeds), strict=True)) for label, seeds in rows.items()
        }
        print(json.dumps({label: {**s, "seeds": rows[label]} for label, s in summaries.items()}, indent=1))
    elif as_csv:
        print(report.comparison_csv(rows), end="")
    elif markdown:
        print(report.comparison_markdown(rows))
        print(report.diagnosis_markdown(rows), end="")
    else:
        console = make_console()
        console.print(report.comparison_table(rows))
        console.print(report.diagnosis_table(rows))
    if plot:
        write_plot(
            plot, accuracy_bands({label: [s["matrix"] for s in seeds] for label, seeds in rows.items()})
        )
