"""The command line: parses, calls, prints. Figures go to standard output, everything else to standard error.

Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from protosteer import __version__
from protosteer.errors import ProtosteerError, ProtosteerWarning

if TYPE_CHECKING:
    from rich.console import Console

    from protosteer.backbones import BackboneInfo

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
