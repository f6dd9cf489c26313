"""Shared by every command: the application, consoles, plots, and stopping by signals."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from protosteer.util.files import write_atomically, writing
from protosteer.util.text import without_control

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

    from protosteer.runtime.progress import OnStage

app = typer.Typer(
    name="protosteer",
    help="Add image classes to a frozen Vision Transformer, task after task, without keeping old images.",
    add_completion=True,
    pretty_exceptions_enable=False,
)


def command(panel: str, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a command to a panel of `--help`.

    A parameter of the function whose type is a dataclass stands for the options that its fields declare.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        parameters = signature.parameters.values()
        groups: dict[str, Any] = {p.name: p.annotation for p in parameters if dataclasses.is_dataclass(p.annotation)}
        options = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}

        @functools.wraps(function)
        def run(**values: Any) -> None:
            objects = {name: group(**{key: values.pop(key) for key in options[name]}) for name, group in groups.items()}
            function(**values, **objects)

        members = [field for p in parameters for field in (options[p.name].values() if p.name in options else [p])]
        keyword_parameters = [field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in members]
        run.__signature__ = signature.replace(parameters=keyword_parameters)  # type: ignore[attr-defined]
        app.command(name, rich_help_panel=panel)(run)
        return function

    return add


class CommandLineError(typer.BadParameter):
    """A command line that contradicts itself or leaves something out.

    Args:
        message: What is wrong, and what to do.
        code: A stable identifier of the mistake, as errors of the library have one.
        option: The option concerned, if the message does not name it.
        **details: Values that the message mentions, by name.
    """

    def __init__(self, message: str, *, code: str, option: str | None = None, **details: Any):
        super().__init__(message, param_hint=option)
        self.code, self.details = code, details


def make_console(stderr: bool = False) -> Console:
    """Return a console; in a file or pipe, which has no width, tables are not squeezed into 80 columns."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = 240
    return console


def show(parts: Iterable[RenderableType], console: Console | None = None) -> None:
    """Print tables and texts."""
    console = console or make_console()
    for part in parts:
        console.print(part)


def print_json(results: Any) -> None:
    """Print results as every `--json` does."""
    print(json.dumps(results, indent=1))


def say(text: str) -> None:
    """Print a message on standard error, without control characters that file names may hold."""
    print("\n".join(map(without_control, text.split("\n"))), file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[OnStage]:
    """Show progress on standard error during the block, in which SIGTERM counts as Ctrl-C."""
    from protosteer.runtime.progress_bar import LearnProgress

    with sigterm_as_ctrl_c(), LearnProgress(make_console(stderr=True)) as bar:
        yield bar.on_stage


def check_plot(plot: Path | None) -> None:
    """Reject a plot that is not a PNG file, before any work is done for it."""
    if plot and plot.suffix.lower() != ".png":
        raise CommandLineError(f"{plot} is not a .png file; plots are PNG files", code="not-a-png", path=plot)


def write_output(path: Path, content: bytes, option: str) -> None:
    """Write a file that an option asked for."""
    with writing(path, option):
        write_atomically(path, content)
    say(f"Written: {path}")


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, also amid an import, where Python may wrap the interrupt in another error."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__
        if cause is None:
            raise
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGTERM, handler)
