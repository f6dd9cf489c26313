"""Jobs on Ray's workers: on this machine, or on a cluster by its address.

Plain actors, not Ray Data: one pool serves shards of images, folders and seeds alike; a job is done whole or
not at all, by name, so that a restart knows which are done; and none of Ray's own bars and tables appear.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import protosteer
from protosteer.errors import ExecutorError, ProtosteerError, ProtosteerWarning
from protosteer.runtime.executor import Job, MakeWork, OnDone, Work
from protosteer.util.text import counted, listed, one_line

RETRIES = 3  # of a job whose worker died
CONNECT_SECONDS = 10.0
_CHECK_SECONDS = 30.0
_POLL_SECONDS = 1.0
# Set before Ray is imported, unless the user has. Workers of a cluster that is started here are niced by default:
# beside other busy processes they would hardly run at all.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else it prints of dead workers, on standard output
    "RAY_worker_niceness": "0",
}


class RayEngine:
    """Workers of one Ray cluster. Each has as many processors as torch has threads here, and perhaps a GPU.

    address: None starts a cluster on this machine, which ends with the work. device: as `choose_device` takes
    it; unless it is "cpu", each worker has one GPU where the cluster has any. on_message: is told of workers
    that died.
    """

    elsewhere = True

    def __init__(
        self,
        address: str | None = None,
        device: str = "auto",
        on_message: Callable[[str], None] = lambda line: None,
    ):
        if importlib.util.find_spec("ray") is None:
            raise ExecutorError("Ray is not installed; pip install 'protosteer[ray]'")
        self.address = address
        self.device = device
        self.on_message = on_message

    def run(
        self,
        make: MakeWork,
        jobs: Sequence[Job],
        on_done: OnDone,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        if not jobs:
            return
        with connected(self.address) as ray:
            threads = torch.get_num_threads()
            gpus = 0 if self.device == "cpu" else int(ray.cluster_resources().get("GPU", 0) >= 1)
            places = _places(ray.nodes(), threads, gpus)
            here = _Circumstances(_versions(), threads, os.getcwd())
            host = ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(_Host)
            made = ray.put(ray.cloudpickle.dumps(make))  # opened when versions are known to agree
            pool = _Pool(ray, lambda: host.remote(here, made), min(places, len(jobs)), self.on_message)
            try:
                pool.run(jobs, on_done, on_wait)
            finally:
                pool.close()


@dataclass(frozen=True)
class _Circumstances:
    """Of the process that asks: what must be the same in a worker for the same bits."""

    versions: dict[str, str]
    threads: int
    folder: str


def _versions() -> dict[str, str]:
    return {"protosteer": protosteer.__version__, "torch": torch.__version__}


class _Host:
    """Lives in a worker's process: makes the work once, then does one job after the other."""

    def __init__(self, wanted: _Circumstances, made: bytes):
        self.wanted = wanted
        self.made = made
        self.work: Work | None = None

    def do(self, arguments: tuple[Any, ...]) -> tuple[Any, list[str]]:
        """The result, and what was warned of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ProtosteerWarning)
            self.work = self.work or self._make()
            result = self.work(*arguments)
        return result, [str(w.message) for w in caught if issubclass(w.category, ProtosteerWarning)]

    def _make(self) -> Work:
        from ray import cloudpickle

        refuse_other_versions(self.wanted.versions, _versions())
        torch.set_num_threads(self.wanted.threads)
        if os.path.isdir(self.wanted.folder):  # so that relative paths mean the same
            os.chdir(self.wanted.folder)
        return cloudpickle.loads(self.made)()


def refuse_other_versions(wanted: dict[str, str], found: dict[str, str]) -> None:
    other = [f"{name} {found[name]}, not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if other:
        raise ExecutorError(
            f"worker {socket.gethostname()} has {' and '.join(other)} as here; install the same versions on all "
            "nodes"
        )


class _Pool:
    """Actors with a job each. One that dies is replaced, and its job given to another, a few times."""

    def __init__(
        self, ray: Any, start: Callable[[], Any], size: int, on_message: Callable[[str], None]
    ) -> None:
        self.ray, self.start, self.size, self.on_message = ray, start, size, on_message
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, Job]] = {}  # by the reference to the result

    def run(self, jobs: Sequence[Job], on_done: OnDone, on_wait: Callable[[], None]) -> None:
        waiting, deaths = deque(jobs), dict.fromkeys((job.name for job in jobs), 0)
        lost: list[str] = []
        while waiting or self.busy:
            while waiting and len(self.busy) < self.size:
                self._give(waiting.popleft())
            done, _ = self.ray.wait(list(self.busy), num_returns=1, timeout=_POLL_SECONDS)
            for reference in done:
                actor, job = self.busy.pop(reference)
                try:
                    result, warned = self.ray.get(reference)
                except self._deaths() as error:
                    deaths[job.name] += 1
                    if deaths[job.name] > RETRIES:
                        lost.append(f"{job.name} ({type(error).__name__})")
                        continue
                    self.on_message(
                        f"{job.name}: its worker died; another one tries again ({deaths[job.name]} of {RETRIES})"
                    )
                    waiting.append(job)
                    continue
                except self.ray.exceptions.RayError as error:
                    raise _told(job, error) from error
                self.idle.append(actor)
                for text in warned:
                    warnings.warn(text, ProtosteerWarning, stacklevel=2)
                on_done(job, result)
            on_wait()
        if lost:
            raise ExecutorError(
                f"workers died {RETRIES + 1} times over {listed(lost, 3)}; what else was to do is done and kept: the "
                "same command tries the rest again"
            )

    def _give(self, job: Job) -> None:
        actor = self.idle.pop() if self.idle else self.start()
        self.busy[actor.do.remote(job.arguments)] = actor, job

    def _deaths(self) -> tuple[type[Exception], ...]:
        errors = self.ray.exceptions
        return (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        )

    def close(self) -> None:
        for actor in (*self.idle, *(actor for actor, _ in self.busy.values())):
            with contextlib.suppress(Exception):  # of a connection that is gone there is nothing to end
                self.ray.kill(actor)


def _told(job: Job, error: Any) -> ExecutorError:
    """A job's own error in one line; the rest, such as a traceback from the worker, is in its cause."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ProtosteerError):
        return ExecutorError(f"{job.name}: {cause}")
    return ExecutorError(f"{job.name} failed on a worker: {type(cause).__name__}: {_reason(cause)}")


def _reason(error: BaseException) -> str:
    return _last_line(str(error)) or type(error).__name__


def _last_line(text: str) -> str:
    """Of a message that may be a whole traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1])[:200] if lines else ""


def _places(nodes: Sequence[dict[str, Any]], threads: int, gpus: int) -> int:
    """How many workers fit into the cluster at once."""
    found = 0
    for node in nodes:
        has = node["Resources"] if node["Alive"] else {}
        cpus = int(has.get("CPU", 0) // threads)
        found += min(cpus, int(has.get("GPU", 0))) if gpus else cpus
    if not found:
        gpu = " and a GPU" if gpus else ""
        raise ExecutorError(
            f"no node of the Ray cluster has {counted(threads, 'processor')}{gpu} for a worker; use fewer threads"
        )
    return found


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected: as this process already is, or to the address, or to a cluster of its own."""
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    if address is not None:
        _check_address(address)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except Exception as error:  # Ray raises nearly anything: of sockets, versions, tokens
        raise ExecutorError(
            f"Ray cannot be reached at {address or 'this machine'}: {_reason(error)}"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray puts its own in place
    try:
        yield ray
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # our own bars and lines say what there is to say
    import ray

    return ray


def _check_address(address: str) -> None:
    """Ray itself waits for long where nobody answers, and may end the process with a page of text."""
    if address == "auto":
        return
    plain = address.removeprefix("ray://")
    host, _, port = plain.rpartition(":")
    if not host or not port.isdecimal():
        raise ExecutorError(
            f"Ray address {address!r} is not HOST:PORT, such as 10.0.0.5:6379, ray://HOST:PORT or auto"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ExecutorError(
            f"nobody answers at Ray address {address} ({one_line(str(error))}); check it, and that the cluster runs"
        ) from error
    problem = _problem_with(address)
    if problem is not None:
        raise ExecutorError(
            f"Ray address {address} answers, but not as a cluster of this Ray that lets us in ({problem}); check the "
            "address, Ray's version there, and its token (RAY_AUTH_MODE=token)"
        )


def _problem_with(address: str) -> str | None:
    """What keeps a process from joining the cluster, found out by one that may be ended."""
    command = [sys.executable, "-c", "import os, ray; ray.init(os.environ['RAY_ADDRESS'])"]
    where = {**os.environ, "RAY_ADDRESS": address}
    try:
        tried = subprocess.run(command, env=where, capture_output=True, text=True, timeout=_CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {_CHECK_SECONDS:g} s"
    return _last_line(tried.stderr) if tried.returncode else None
