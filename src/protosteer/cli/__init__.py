"""The command line: parses, calls, prints. Figures go to standard output, everything else to standard error.

Heavy modules are imported inside the commands, so that `--help` answers at once. Commands are in the order of `--help`:
one's own images, benchmarks, lists.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

from protosteer import __version__

from protosteer.cli import learning, predicting, managing, benchmarks, lists  # isort: skip (the order of --help)
from protosteer.cli.common import app, one_line, say
from protosteer.errors import ProtosteerError, ProtosteerWarning

__all__ = ["benchmarks", "learning", "lists", "main", "managing", "predicting"]

# typer has a click of its own, or in older versions uses the one installed; this name is right for both.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

USER_MISTAKE = 2
INTERRUPTED = 130


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
                say(f"error: {one_line(_message(error))}")
            return USER_MISTAKE
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:  # whoever read the output has had enough of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code
        say("interrupted; nothing half-written was left behind")
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
        say(f"warning: {one_line(str(message))}")
    else:
        say(warnings.formatwarning(message, category, filename, lineno, line).rstrip())
