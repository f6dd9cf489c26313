"""A command under torchrun: process 0 runs it, the others help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from protosteer.cli.common import say
from protosteer.errors import DistributedError, ProtosteerError
from protosteer.util import distributed
from protosteer.util.text import one_line

FAILED = 2


def run_by_several(command: Callable[[], int]) -> int:
    """The exit code of this process, if the group did all of its work; otherwise this process ends here.
    Where the command fails, helpers notice that the leader has gone.
    """
    try:
        here = distributed.join()
    except ProtosteerError as error:
        say(f"error: {error}")
        return FAILED
    if not here.leads:
        return _help(here)
    code = command()
    if code:
        _end(code)
    with suppress(DistributedError):  # all was done, whatever becomes of a helper now
        here.leave()
    return 0


def _help(here: distributed.World) -> int:
    """Ctrl-C and a polite kill are the leader's to answer: helpers go when it has gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        here.help()
        here.leave()
    except DistributedError:  # of which the leader tells, if it lives
        _end(FAILED)
    except (ProtosteerError, OSError) as error:
        say(f"error in {distributed.name(here.rank, here.size)}: {one_line(str(error))}")
        _end(FAILED)
    return 0


def _end(code: int) -> NoReturn:
    """Leave a group that is broken. Gloo's threads still wait for the others: at a usual exit they would, now and
    then, abort the process, and its exit code with it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
