"""Several processes for tests: this one leads, others that are started for it help."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from protosteer.util import distributed

TESTS = Path(__file__).resolve().parent
HELPER = "from protosteer.cli.torchrun import run_by_several; raise SystemExit(run_by_several(lambda: 3))"


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """As torchrun sets them."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {"TORCHELASTIC_RUN_ID": "test", **{name: str(value) for name, value in names.items()}}


def start(words: list[str], rank: int, size: int, port: int) -> subprocess.Popen[str]:
    """One of the processes of a group, by itself; modules of the tests can be imported in it."""
    paths = [str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        **os.environ,
        **variables(rank, size, port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.Popen(
        [sys.executable, *words], env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@contextmanager
def team(size: int) -> Iterator[distributed.World]:
    """A world of so many, led by this process; afterwards this process is alone again."""
    port = free_port()
    helpers = [start(["-c", HELPER], rank, size, port) for rank in range(1, size)]
    before = dict(os.environ)
    os.environ.update(variables(0, size, port))
    try:
        here = distributed.join()
        yield here
        here.leave()
        assert [helper.wait(60) for helper in helpers] == [0] * len(helpers)
    finally:
        os.environ.clear()
        os.environ.update(before)
        distributed._here = distributed.World()
        if dist.is_initialized():  # not left in peace
            dist.destroy_process_group()
        for helper in helpers:
            helper.kill()
            print(helper.communicate()[1])


@contextmanager
def alone() -> Iterator[None]:
    """What one process would do, although there are helpers, who wait."""
    here, distributed._here = distributed._here, distributed.World()
    try:
        yield
    finally:
        distributed._here = here


def count_held(here: distributed.World) -> None:
    """For helpers: tell the leader how many things are lent to them."""
    here.gathered(torch.tensor([float(len(here._held))]), [])
