"""What every command uses: the application, its consoles, its plots, and how it may be stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from protosteer.util.text import without_control

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

app = typer.Typer(
    name="protosteer",
    help="Teach a frozen Vision Transformer new image classes, task after task, without old images.",
    add_completion=True,
    pretty_exceptions_enable=False,
)


class CommandLineError(typer.BadParameter):
    """A command line that contradicts itself or leaves something out.

    Args:
        message: What is wrong, and what to do.
        code: A stable identifier of the mistake, as errors of the library have one.
        option: The option it is about, if the message does not name it.
        **details: What the message is about.
    """

    def __init__(self, message: str, *, code: str, option: str | None = None, **details: Any):
        super().__init__(message, param_hint=option)
        self.code, self.details = code, details


def error_code(error: Exception) -> str:
    """Return the stable identifier of an error that a command ended with."""
    return getattr(error, "code", "cannot-write" if isinstance(error, OSError) else "usage")


def make_console(stderr: bool = False) -> Console:
    """A file or a pipe has no width, so tables need not be squeezed into 80 columns there."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = 240
    return console


def show(parts: Iterable[RenderableType], console: Console | None = None) -> None:
    console = console or make_console()
    for part in parts:
        console.print(part)


def say(text: str) -> None:
    """On standard error; names in it come from other people's files."""
    print("\n".join(map(without_control, text.split("\n"))), file=sys.stderr, flush=True)


def check_plot(plot: Path | None) -> None:
    """Before any work is done for it."""
    if plot and plot.suffix.lower() != ".png":
        raise CommandLineError(f"{plot} is not a .png file; the plot is one", code="not-a-png", path=plot)


def write_plot(plot: Path, picture: bytes, option: str = "--plot") -> None:
    from protosteer.util.files import write_atomically, writing

    with writing(plot, option):
        write_atomically(plot, picture)
    say(f"Written: {plot}")


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """A polite kill ends in the same way as Ctrl-C, also amid an import, where Python may call it another error."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
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
        signal.signal(signal.SIGTERM, before)
