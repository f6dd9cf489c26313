"""Run jobs as Ray tasks: on this machine, or on a cluster by its address.

Plain tasks, not Ray Data: a job is done completely or not at all, by name, so that a restart knows which are done.
Ray restarts a task whose worker dies.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import protosteer
from protosteer.errors import ExecutorError, ProtosteerError, ProtosteerWarning
from protosteer.runtime.executor import Job, MakeWork, OnDone, Work
from protosteer.util.text import counted, listed, one_line

RETRIES = 3  # of a job whose worker died
CONNECT_SECONDS = 10.0
_POLL_SECONDS = 1.0
# Set before Ray is imported, unless the user has set them.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else Ray prints messages about dead workers on standard output
    "RAY_task_oom_retries": str(RETRIES),  # else without end
    "RAY_worker_niceness": "0",  # else workers hardly run beside other busy processes
}


class RayExecutor:
    """Run jobs on a Ray cluster. A job has as many processors as torch has threads here, and perhaps a GPU.

    Without an `address` a cluster starts on this machine and ends with the work. Unless `device` is "cpu", a job has
    one GPU if the cluster has any.
    """

    is_remote = True

    def __init__(self, address: str | None = None, device: str = "auto"):
        if importlib.util.find_spec("ray") is None:
            raise ExecutorError("Ray is not installed; run: pip install 'protosteer[ray]'", code="no-ray")
        self.address = address
        self.device = device

    def run(
        self, make: MakeWork, jobs: Sequence[Job], on_done: OnDone, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Do all jobs; see `Executor.run`."""
        if not jobs:
            return
        with _connect(self.address) as ray:
            threads = torch.get_num_threads()
            gpus = 0 if self.device == "cpu" else int(ray.cluster_resources().get("GPU", 0) >= 1)
            _check_room(ray.nodes(), threads, gpus)
            remote_function = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)(_do_job)
            shared = [ray.put(item) for item in (ray.cloudpickle.dumps(make), _versions())]
            pending = {remote_function.remote(*shared, threads, os.getcwd(), job.arguments): job for job in jobs}
            try:
                _collect(ray, pending, on_done, on_wait)
            finally:
                for reference in pending:
                    with contextlib.suppress(Exception):  # the connection may be lost
                        ray.cancel(reference, force=True)


def _collect(ray: Any, pending: dict[Any, Job], on_done: OnDone, on_wait: Callable[[], None]) -> None:
    errors = ray.exceptions
    deaths = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)
    lost: list[str] = []
    while pending:
        ready_references, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_SECONDS)
        for reference in ready_references:
            job = pending.pop(reference)
            try:
                result, messages = ray.get(reference)
            except deaths as error:
                lost.append(f"{job.name} ({type(error).__name__})")
                continue
            except errors.RayError as error:
                raise _job_error(job, error) from error
            for message in messages:
                warnings.warn(message, ProtosteerWarning, stacklevel=2)
            on_done(job, result)
        on_wait()
    if lost:
        raise ExecutorError(
            f"workers died {RETRIES + 1} times over {listed(lost, 3)}; all other jobs are done and saved. To try "
            "the rest again, run the same command",
            code="workers-died",
            jobs=lost,
        )


# The code below runs in a worker's process, which does one job after the other.

_work: tuple[bytes, Work] | None = None  # the pickled `make`, and the function it made


def _do_job(
    make: bytes, versions: dict[str, str], threads: int, folder: str, arguments: tuple[Any, ...]
) -> tuple[Any, list[str]]:
    """Do one job in a worker; return its result and its warnings."""
    global _work
    from ray import cloudpickle

    check_versions(versions, _versions())
    torch.set_num_threads(threads)
    if os.path.isdir(folder):  # so that relative paths mean the same
        os.chdir(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ProtosteerWarning)
        if _work is None or _work[0] != make:
            _work = make, cloudpickle.loads(make)()
        result = _work[1](*arguments)
    return result, [str(w.message) for w in caught if issubclass(w.category, ProtosteerWarning)]


def _versions() -> dict[str, str]:
    return {"protosteer": protosteer.__version__, "torch": torch.__version__}


def check_versions(versions: dict[str, str], worker: dict[str, str]) -> None:
    """Raise if the packages of a `worker` have other versions than those of the process that submits jobs."""
    differences = [
        f"{name} {worker[name]}, not {version}" for name, version in versions.items() if worker[name] != version
    ]
    if differences:
        message = f"worker {socket.gethostname()} has {' and '.join(differences)} as here; install the same versions on all nodes"
        raise ExecutorError(message, code="other-version")


def _job_error(job: Job, error: Any) -> ExecutorError:
    """Return a job's own error in one line; the worker's traceback is in its cause."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ProtosteerError):
        return ExecutorError(f"{job.name}: {cause}", code=cause.code, **{"job": job.name, **cause.details})
    message = f"{job.name} failed on a worker: {type(cause).__name__}: {_last_line(cause)}"
    return ExecutorError(message, code="job-failed", job=job.name)


def _last_line(error: BaseException) -> str:
    """Return the last line of a message, which may be a whole traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1])[:200] if lines else type(error).__name__


def _check_room(nodes: Sequence[dict[str, Any]], threads: int, gpus: int) -> None:
    """Raise if a job fits on no node: Ray would wait for one."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(node.get("CPU", 0) >= threads and node.get("GPU", 0) >= gpus for node in alive):
        gpu = " and a GPU" if gpus else ""
        message = f"no node of the Ray cluster has {counted(threads, 'processor')}{gpu} for a worker; use fewer threads"
        raise ExecutorError(message, code="no-room-for-worker", threads=threads)


@contextlib.contextmanager
def _connect(address: str | None) -> Iterator[Any]:
    """Yield Ray, connected: as this process already is, or to the address, or to a cluster of its own."""
    check_address(address)
    if address is not None:
        # Ray asks 20 times, for 40 seconds each, before it says that a server is not a Ray cluster.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except Exception as error:  # Ray raises nearly anything: of sockets, versions, tokens
        message = (
            f"Ray cannot be reached at {address or 'this machine'} ({_last_line(error)}); check the address, Ray's "
            "version there, and its token (RAY_AUTH_MODE=token)"
        )
        raise ExecutorError(message, code="ray-unreachable", address=address) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, sigterm_handler)  # Ray has installed its own handler
    try:
        yield ray
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """Import Ray with its messages switched off."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    import ray

    return ray


def check_address(address: str | None) -> None:
    """Raise if nothing answers at HOST:PORT: Ray itself waits long, and may end the process."""
    if address in (None, "auto"):
        return
    host, _, port = str(address).removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        message = f"Ray address {address!r} is not HOST:PORT, such as 10.0.0.5:6379, ray://HOST:PORT or auto"
        raise ExecutorError(message, code="bad-address", address=address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        message = (
            f"nothing answers at Ray address {address} ({one_line(str(error))}); check it, and that the cluster runs"
        )
        raise ExecutorError(message, code="ray-unreachable", address=address) from error
