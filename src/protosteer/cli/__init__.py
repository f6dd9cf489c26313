"""The command line: parses, calls, prints. Results go to standard output, everything else to standard error.

Heavy modules are imported inside the commands, so that `--help` answers at once. Commands are in the order of
`--help`: your own images, benchmarks, lists.
"""

from __future__ import annotations

import functools
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer import Option

from protosteer import __version__

# Each adds its commands; the order is that of --help.
# isort: off
from protosteer.cli import learn, predict, correct, evaluate, sort, suggest  # noqa: F401
from protosteer.cli import rename, model_commands, verify, history, adapt, serve, sharing  # noqa: F401
from protosteer.cli import benchmarks, experiments, reproduce, report, catalogue  # noqa: F401

# isort: on
from protosteer.cli.common import app, say
from protosteer.cli.help_text import arrange
from protosteer.cli.options import in_flags
from protosteer.errors import ProtosteerError, ProtosteerWarning
from protosteer.util.system import keep_freed_memory
from protosteer.util.text import one_line

__all__ = ["main"]

# typer has a click of its own, or in older versions uses the one installed; this name is right for both.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

USER_MISTAKE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, on_error: Callable[[Exception], None] = lambda error: None) -> int:
    """Run a command.

    Args:
        arguments: The words of the command line; those of this process by default.
        on_error: Is given the error that ends the command, before its message is printed.

    Returns:
        The exit code: 0, 2 for a user's mistake, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    _share_the_cores()
    keep_freed_memory()
    _print_any_name()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return _run(words, on_error)
    from protosteer.cli.torchrun import run_on_every_rank

    return run_on_every_rank(words, lambda may_report: _run(words, on_error, may_report))


@functools.cache
def commands() -> Any:
    """Build the commands, once per process."""
    return arrange(typer.main.get_command(app))


def _run(words: list[str], on_error: Callable[[Exception], None], may_report: Callable[[], bool] = lambda: True) -> int:
    """Run a command and return its exit code. Of several processes, `may_report` lets one print the error."""
    debug = "--debug" in words
    # Accepted anywhere, since users append it to a line that has just failed.
    command_words = [word for word in words if word != "--debug"] or ["--help"]
    with warnings.catch_warnings():
        warnings.simplefilter("default", ProtosteerWarning)
        warnings.filterwarnings("ignore", module=r"PIL\.")  # Pillow's notes about images that it can read
        warnings.showwarning = _show_warning
        try:
            # If the reader of the output has gone, typer ends the process with code 1.
            code = commands()(args=command_words, prog_name="protosteer", standalone_mode=False)
        except (ProtosteerError, UsageError, OSError) as error:
            on_error(error)
            if not may_report():
                return USER_MISTAKE
            if debug:
                traceback.print_exc()
            else:
                say(f"error: {one_line(_message(error))}")
            if isinstance(error, OSError):
                _give_up_output()
            return USER_MISTAKE
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
    if code == INTERRUPTED and may_report():  # typer turns Ctrl-C into this code
        say("interrupted; no half-written file is left")
    return int(code or 0)


def _share_the_cores() -> None:
    """Let OpenMP's waiting threads sleep soon instead of spinning; torch reads this when it is loaded.

    Spinning gains nothing measurable here on idle cores. Beside another busy process it takes the core from the
    thread that is waited for: docs/explanation/performance.md.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _print_any_name() -> None:
    """Print the bytes of file names that are not text in the terminal's encoding as they are, or escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if unicode else "backslashreplace")


def _give_up_output() -> None:
    """Discard output that cannot be printed: flushing it at exit would fail again, with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(is_set: bool) -> None:
    if is_set:
        print(f"protosteer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", help="Print the version.", is_eager=True, callback=_version)] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `main` looks for --debug itself."""


def _message(error: Exception) -> str:
    """Return the message of an error; that of a wrong command line also names the help to read."""
    if isinstance(error, OSError):  # a full disk under the output, a folder that may not be read
        return f"{error}; --debug shows where"
    if isinstance(error, ProtosteerError):
        return in_flags(str(error))
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "protosteer"
    message = error.format_message()  # type: ignore[attr-defined]
    message = re.sub(r"^Invalid value for '?([^':]+)'?: ", r"\1: ", message).removeprefix("Invalid value: ")
    message = message.replace(": Value error, ", ": ").replace(": Input should be ", ": must be ")
    return f"{message.rstrip('.')}; see {command} --help"


def _show_warning(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
    if issubclass(category, ProtosteerWarning):
        say(f"warning: {one_line(in_flags(str(message)))}")
    else:
        filename, lineno = location[:2]
        say(warnings.formatwarning(message, category, filename, lineno).rstrip())
