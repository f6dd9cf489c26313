"""Processes with an environment of their own that run a job when told to, and say how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch  # before protosteer in every worker: the OpenMP library reads the environment when it is loaded

Job = Callable[[], object]


class Worker:
    """A process that makes its job and runs it once before it is ready; then it waits without using a core."""

    def __init__(self, make: Callable[..., Job], *args: Any, env: Mapping[str, str | None] | None = None):
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, make, args), daemon=True)
        with environment(env or {}):
            self._process.start()
        theirs.close()  # so that a worker's death is seen as the end of the pipe
        self._pipe.recv()

    def begin(self) -> None:
        self._pipe.send(True)

    def seconds(self) -> float:
        """Of the run that was begun, as the worker itself saw them."""
        return float(self._pipe.recv())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()


def together(workers: Sequence[Worker]) -> float:
    """Seconds until all are done; all wait for the start."""
    for worker in workers:
        worker.begin()
    return max(worker.seconds() for worker in workers)


@contextmanager
def busy_core() -> Iterator[None]:
    """One process that keeps one core busy meanwhile."""
    process = get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Variables with these values; None: absent."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _work(pipe: Connection, make: Callable[..., Job], args: tuple[Any, ...]) -> None:
    job = make(*args)
    job()
    pipe.send(True)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        job()
        pipe.send(time.perf_counter() - begin)


def _spin() -> None:
    torch.set_num_threads(1)
    matrix = torch.eye(256)
    while True:
        matrix = matrix @ matrix
