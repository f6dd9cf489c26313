"""Processes with an environment of their own that run a job when told to, and say how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import torch  # before protosteer in every worker: the OpenMP library reads the environment when it is loaded

from protosteer.bench.timing import interleaved

Job = Callable[..., object]


class Worker:
    """A process that makes its job and then waits, without using a core, until it is told to run it."""

    def __init__(self, make: Callable[..., Job], *args: Any, env: Mapping[str, str | None] | None = None):
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, make, args), daemon=True)
        with environment(env or {}):
            self._process.start()
        theirs.close()  # so that a worker's death is seen as the end of the pipe
        self._pipe.recv()

    def begin(self, *args: Any) -> None:
        self._pipe.send(args)

    def seconds(self) -> float:
        """Of the run that was begun, as the worker itself saw them."""
        return float(self._pipe.recv())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()


def together(workers: Sequence[Worker], *args: Any) -> float:
    """Seconds until all have run their job with these arguments; all wait for the start."""
    for worker in workers:
        worker.begin(*args)
    return max(worker.seconds() for worker in workers)


def own_times(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """As `interleaved`, with the seconds that each side says, which leave out how long the telling takes."""
    said: dict[str, list[float]] = {name: [] for name in sides}

    def run(name: str) -> None:
        said[name].append(sides[name]())

    interleaved({name: partial(run, name) for name in sides}, repeats)
    return {name: seconds[1:] for name, seconds in said.items()}  # the first one was to warm up


@contextmanager
def busy_core() -> Iterator[None]:
    """One process that keeps one core busy meanwhile, as someone else's would: in a session of its own."""
    context = get_context("spawn")
    spinning = context.Event()
    process = context.Process(target=_spin, args=(spinning,), daemon=True)
    process.start()
    try:
        spinning.wait()
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
    pipe.send("ready")
    while True:
        try:
            told = pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        job(*told)
        pipe.send(time.perf_counter() - begin)


def _spin(spinning: Event) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # Linux shares the cores out among sessions first
    torch.set_num_threads(1)
    matrix = torch.eye(256)
    spinning.set()
    parent = parent_process()
    while parent is not None and parent.is_alive():  # a killed parent must not leave a busy core behind
        matrix = matrix @ matrix
