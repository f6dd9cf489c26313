"""The command line: parses, calls, prints. Figures go to standard output, everything else to standard error.

Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from protosteer import __version__
from protosteer.errors import ProtosteerError, ProtosteerWarning

if TYPE_CHECKING:
    from rich.console import Console

    from protosteer.backbones import BackboneInfo
    from protosteer.data.catalogue import DatasetStatus

# typer has a click of its own, or in older versions uses the one installed; this name is right for both.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

USER_MISTAKE = 2
INTERRUPTED = 130

app = typer.Typer(
    name="protosteer",
    help="Teach a frozen Vision Transformer new image classes, task after task, without old images.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _share_the_cores()
    debug = "--debug" in given
    # The option is accepted in any place, as one adds it to the end of a line that has just failed.
    wanted = [word for word in given if word != "--debug"] or ["--help"]
    with warnings.catch_warnings():
        warnings.simplefilter("default", ProtosteerWarning)
        warnings.showwarning = _show_warning
        try:
            code = app(args=wanted, prog_name="protosteer", standalone_mode=False)
        except (ProtosteerError, UsageError) as error:
            if debug:
                traceback.print_exc()
            else:
                _say(f"error: {_one_line(_message(error))}")
            return USER_MISTAKE
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code
        _say("interrupted; nothing half-written was left behind")
    return int(code or 0)


def _share_the_cores() -> None:
    """Threads that wait for one another sleep soon instead of spinning; read when torch is loaded.

    By default GNU OpenMP's threads spin for milliseconds. On idle cores that gains nothing measurable here; beside
    another busy process it takes the core from the very thread that is waited for: docs/performance.md.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=lambda on: _version(on)),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where in the code an error arose.")] = False,
) -> None:
    """Options of every command; `main` looks for --debug itself."""


def _version(asked: bool) -> None:
    if asked:
        print(f"protosteer {__version__}")
        raise typer.Exit


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model, the plots and the figures.")] = Path(
        "protosteer-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn the ten digits two at a time, in four variants, and show what is forgotten. About a minute."""
    from protosteer.demo import run_demo, show, tell_files

    log = _console(stderr=True)
    outcome = run_demo(out, seed, log)
    if as_json:
        print(json.dumps(outcome.figures, indent=2))
    else:
        show(outcome, _console())
    tell_files(outcome, log)


@app.command()
def backbones(as_json: Json = False) -> None:
    """List the backbones that have a short name, and whether their weights are on this disk."""
    from protosteer.backbones import cache_dir, list_backbones

    folder = cache_dir() / "weights"
    rows = list_backbones()
    if as_json:
        print(json.dumps({"backbones": [_backbone(row) for row in rows], "folder": str(folder)}, indent=2))
        return
    _show_backbones(rows, _console())
    _say(
        f"Weights that are not on disk are fetched when first used, or put the file at {folder}/CHECKPOINT.safetensors"
    )


def _backbone(row: BackboneInfo) -> dict[str, Any]:
    return {
        "alias": row.alias,
        "name": row.name,
        "parameters": row.parameters,
        "image_size": row.preprocessing.image_size,
        "mean": list(row.preprocessing.mean),
        "std": list(row.preprocessing.std),
        "pool": row.pool,
        "licence": row.licence,
        "on_disk": row.on_disk,
        "path": str(row.path) if row.path else None,
    }


def _show_backbones(rows: Sequence[BackboneInfo], console: Console) -> None:
    from protosteer.report.tables import plain_table

    table = plain_table()
    for heading in (
        "Name",
        "Checkpoint",
        "Parameters",
        "Input",
        "Mean",
        "Std",
        "Pooling",
        "Licence",
        "On disk",
    ):
        table.add_column(
            heading, justify="right" if heading in ("Parameters", "Input") else "left", overflow="fold"
        )
    for row in rows:
        p = row.preprocessing
        table.add_row(
            row.alias, row.name, f"{row.parameters / 1e6:.1f} M", f"{p.image_size} px", _triple(p.mean),
            _triple(p.std), {"token": "class token", "mean": "patch mean"}[row.pool], row.licence,
            str(row.path) if row.path else "no",
        )  # fmt: skip
    console.print(table)


def _triple(values: Sequence[float]) -> str:
    """Statistics of three channels, as one number where they are equal."""
    return " ".join(f"{value:g}" for value in dict.fromkeys(values))


datasets_app = typer.Typer(invoke_without_command=True)
app.add_typer(datasets_app, name="datasets")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder for data sets (default: PROTOSTEER_DATA, or the cache)."),
]


@datasets_app.callback()
def datasets(context: typer.Context, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets that streams are made of, and whether they are on this disk."""
    context.obj = data_dir
    if context.invoked_subcommand:
        return
    from protosteer.data.catalogue import data_root, list_datasets

    root, rows = data_root(data_dir), list_datasets(data_dir)
    if as_json:
        print(json.dumps({"datasets": [_dataset(row) for row in rows], "folder": str(root)}, indent=2))
        return
    _show_datasets(rows, root, _console())
    _say(
        f"Data sets are looked for in {root}; what is absent is fetched when first used, "
        "or by: protosteer datasets get NAME"
    )


@datasets_app.command("get")
def get_datasets(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Data sets to get.", show_default=False)
    ],
    data_dir: DataDir = None,
) -> None:
    """Download data sets that are not there yet, and check their files."""
    from protosteer.data.catalogue import data_root, find_dataset, get_dataset

    root = data_root(data_dir or context.obj)
    for info in [find_dataset(name) for name in names]:
        folder, checksums = get_dataset(info, root)
        official = sum(value.startswith("md5:") for value in checksums.values())
        checked = f", {official} files as published" if official else ""
        print(f"{info.name}: in {folder}{checked}")


def _dataset(row: DatasetStatus) -> dict[str, Any]:
    info = row.info
    return {
        "name": info.name,
        "title": info.title,
        "classes": info.classes,
        "bytes": info.size,
        "licence": info.licence,
        "source": info.source,
        "files": [
            {"name": file.name, "bytes": file.size, "md5": file.md5, "urls": list(file.urls)}
            for file in info.files
        ],
        "note": info.note or None,
        "by_hand": info.by_hand or None,
        "present": row.path is not None,
        "path": str(row.path) if row.path else None,
    }


def _show_datasets(rows: Sequence[DatasetStatus], root: Path, console: Console) -> None:
    from protosteer.report.tables import plain_table

    table = plain_table()
    table.add_column("Name", no_wrap=True)
    table.add_column("Classes", justify="right")
    table.add_column("Download", justify="right", no_wrap=True)
    for heading in ("Licence", "Source", "On disk"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        info = row.info
        size = "by hand" if info.by_hand else "unknown" if info.files else "none"
        if info.size:
            size = f"{info.size / 1e6:,.0f} MB"
        source = info.source.partition("://")[2].removeprefix("www.").rstrip("/")
        if console.width < 120:  # the host alone fits into one line
            source = source.partition("/")[0]
        table.add_row(info.name, str(info.classes), size, info.licence, source, _place(row, root))
    console.print(table)


def _place(row: DatasetStatus, root: Path) -> str:
    """Short where it lies in the folder for data, which is named below the table."""
    path = row.path
    if path is None:
        return "no"
    if row.info.shipped_with:
        return f"with {row.info.shipped_with}"
    return str(path.relative_to(root)) if path.is_relative_to(root) and path != root else str(path)


@app.command()
def run(
    stream: Annotated[
        str | None,
        typer.Argument(
            help="split-cifar100, five-datasets, imagenet-subset, imagenet-r, cub200, split-digits or folder:PATH."
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

    from protosteer.evaluation.experiment import (
        Experiment,
        overridden,
        parse_settings,
        read_config,
        run_experiment,
    )
    from protosteer.evaluation.manifest import command_line
    from protosteer.report.progress import RunProgress
    from protosteer.report.tables import run_report

    values = overridden(read_config(config) if config else {}, given | parse_settings(set_ or []))
    experiment = Experiment.from_values(values)
    log = _console(stderr=True)
    with _interruptible(experiment.folder):
        figures = run_experiment(
            experiment,
            resume=resume,
            overwrite=overwrite,
            command=command_line(),
            make_reporter=lambda stream, costs, note: RunProgress(log, stream, costs, note),
            on_message=_say,
        )
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        console = _console()
        for part in run_report(figures):
            console.print(part)
    _say(f"Written: {experiment.folder}")


@app.command()
def bench(
    subjects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SUBJECT",
            help="Of prediction, training, precision, matrix, centroids, augmentation, scaling, memory, startup.",
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
    ratios = run_all(subjects or None, repeats, _say)
    if as_json:
        print(json.dumps(figures(ratios), indent=1))
        return
    console = _console()
    for part in table(ratios):
        console.print(part)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C and a polite kill end a run in the same way, and it can go on."""
    import signal

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        words = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
        _say(
            f"stopped; {folder} keeps what was done. Go on with: protosteer {shlex.join([*words, '--resume'])}"
        )
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
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
    from protosteer.files import write_atomically, writing
    from protosteer.report import compare as report
    from protosteer.report.plots import accuracy_bands

    if markdown + as_csv + as_json > 1:
        raise typer.BadParameter("choose one of --markdown, --csv and --json")
    if plot and plot.suffix.lower() != ".png":
        raise typer.BadParameter(f"{plot} is not a .png file; the plot is one")
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
        console = _console()
        console.print(report.comparison_table(rows))
        console.print(report.diagnosis_table(rows))
    if plot:
        picture = accuracy_bands({label: [s["matrix"] for s in seeds] for label, seeds in rows.items()})
        with writing(plot, "--plot"):
            write_atomically(plot, picture)
        _say(f"Written: {plot}")


def _console(stderr: bool = False) -> Console:
    """A file or a pipe has no width, so tables need not be squeezed into 80 columns there."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = 240
    return console


def _message(error: Exception) -> str:
    """The error in words; a wrong command line also names the help that would have prevented it."""
    if not isinstance(error, UsageError):
        return str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "protosteer"
    return f"{error.format_message().rstrip('.')}; see {command} --help"  # type: ignore[attr-defined]


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, ProtosteerWarning):
        _say(f"warning: {_one_line(str(message))}")
    else:
        _say(warnings.formatwarning(message, category, filename, lineno, line).rstrip())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())
