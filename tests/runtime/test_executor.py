"""Run independent jobs, as far as that can be tested without a cluster."""

import importlib.util
import socket

import pytest

from expect import expect_error
from protosteer.errors import ExecutorError
from protosteer.runtime import ray_executor
from protosteer.runtime.executor import Job, LocalExecutor


def test_locally_work_is_made_once_and_jobs_run_in_order() -> None:
    made, done = [], []

    def make():
        made.append(1)
        return lambda x: x * x

    jobs = [Job(str(i), (i,)) for i in range(3)]
    LocalExecutor().run(make, jobs, lambda job, result: done.append((job.name, result)))
    assert made == [1] and done == [("0", 0), ("1", 1), ("2", 4)]
    LocalExecutor().run(lambda: pytest.fail("there are no jobs"), [], lambda job, result: None)


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with expect_error("no-ray", ExecutorError):
        ray_executor.RayExecutor()


def test_versions_of_workers_must_agree() -> None:
    expected = {"protosteer": "1.0", "torch": "2.5"}
    ray_executor.check_versions(expected, dict(expected))
    with expect_error("other-version", ExecutorError):
        ray_executor.check_versions(expected, {**expected, "torch": "2.4"})


def test_a_job_must_fit_on_a_node() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}},
        {"Alive": True, "Resources": {"CPU": 9.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    for threads, gpus in ((9, 0), (8, 1)):
        ray_executor._check_room(nodes, threads, gpus)
    for threads, gpus in ((10, 0), (9, 1)):
        with expect_error("no-room-for-worker", ExecutorError, threads=threads):
            ray_executor._check_room(nodes, threads, gpus)


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "host:http"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with expect_error("bad-address", ExecutorError, address=address):
        ray_executor.check_address(address)


def test_an_address_is_tried_before_ray_is() -> None:
    ray_executor.check_address(None)
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with expect_error("ray-unreachable", ExecutorError, address=address):
            ray_executor.check_address(address)
