"""Run a command under torchrun: the same command on every rank; rank 0 writes files and prints."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from protosteer.cli.common import say
from protosteer.errors import DistributedError, ProtosteerError

# Commands that share their work. Rank 0 runs any other command alone.
COMMANDS = ("run", "learn", "adapt")
FAILURE = 2

_rank_folder: tempfile.TemporaryDirectory[str] | None = None


def run_on_every_rank(words: list[str], command: Callable[[Callable[[], bool]], int]) -> int:
    """Run a command on all ranks.

    Args:
        words: The command line.
        command: Runs it. Gets a function that says whether this rank may report an error, and returns the exit
            code.

    Returns:
        The exit code. If it is not 0 the process ends here.
    """
    if next((word for word in words if not word.startswith("-")), None) not in COMMANDS:
        return command(lambda: True) if os.environ["RANK"] == "0" else 0
    from protosteer.util.distributed import join

    try:
        group = join()
    except ProtosteerError as error:
        say(f"error: {error}")
        return FAILURE
    output = sys.stdout, sys.stderr
    if not group.is_rank0:
        # Ctrl-C and SIGTERM are handled by rank 0; the other ranks end when rank 0 has ended.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def may_report() -> bool:
        if not group.claim_report():
            return False
        sys.stdout, sys.stderr = output
        if not group.is_rank0:
            print(f"{group}: ", end="", file=sys.stderr)
        return True

    try:
        code = command(may_report)
    except BaseException:
        if may_report():
            raise
        _exit(FAILURE)
    if code:
        _exit(code)
    with suppress(DistributedError):  # this rank's work is done, even if other ranks fail now
        group.leave()
    return 0


def output_path(path: Path, is_state: Callable[[Path], bool] = Path.is_file) -> Path:
    """Return the path that this rank writes: `path` on rank 0, a private copy of it on every other rank.

    So every rank reads back its own file, and no rank reads a file that another one is changing. The nodes need
    no common file system. Every call makes a new copy.

    Args:
        path: A file or folder that the command reads and writes.
        is_state: Whether the path holds the state of an earlier command, which is then copied.
    """
    global _rank_folder
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return path
    from protosteer.util.distributed import process_group

    group = process_group()
    files: dict[str, bytes] = group.broadcast_object(lambda: _read_contents(path) if is_state(path) else {})
    if group.is_rank0:
        return path
    _rank_folder = _rank_folder or tempfile.TemporaryDirectory(prefix="protosteer-")
    place = path.resolve()  # run folders of several methods have equal names, such as order-1
    target = Path(_rank_folder.name, f"{zlib.crc32(os.fsencode(place.parent)):08x}", place.name)
    target.parent.mkdir(exist_ok=True)
    if target.is_file():
        target.unlink()
    for name, content in files.items():
        copy = target / name if name else target
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return target


def _read_contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def _exit(code: int) -> NoReturn:
    """End this process at once.

    The threads of gloo still wait for the other ranks. A regular exit would sometimes abort there and lose the
    exit code.
    """
    if _rank_folder:
        _rank_folder.cleanup()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
