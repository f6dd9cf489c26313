"""Doing independent jobs, as far as it can be told without a cluster."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from protosteer.errors import ExecutorError
from protosteer.runtime import ray_executor
from protosteer.runtime.executor import Job, Local


def test_here_work_is_made_once_and_done_in_order():
    made, done = [], []

    def make():
        made.append(1)
        return lambda x: x * x

    Local().run(
        make, [Job(str(i), (i,)) for i in range(3)], lambda job, result: done.append((job.name, result))
    )
    assert made == [1] and done == [("0", 0), ("1", 1), ("2", 4)]
    Local().run(lambda: pytest.fail("nothing is to be done"), [], lambda job, result: None)


def test_without_ray_one_line_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExecutorError, match=r"pip install 'protosteer\[ray\]'"):
        ray_executor.RayEngine()


def test_other_versions_are_refused():
    here = {"protosteer": "1.0", "torch": "2.5"}
    ray_executor.refuse_other_versions(here, dict(here))
    with pytest.raises(ExecutorError, match="has torch 2.4, not 2.5 as here; install the same"):
        ray_executor.refuse_other_versions(here, {**here, "torch": "2.4"})


def test_workers_are_as_many_as_fit():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}},
        {"Alive": True, "Resources": {"CPU": 3.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    assert ray_executor._places(nodes, 2, 0) == 5
    assert ray_executor._places(nodes, 2, 1) == 1
    with pytest.raises(ExecutorError, match="has 9 processors for a worker"):
        ray_executor._places(nodes, 9, 0)


def test_addresses_are_tried_before_ray_is():
    for wrong in ("nonsense", "host:", ":6379", "host:http"):
        with pytest.raises(ExecutorError, match="is not HOST:PORT"):
            ray_executor._check_address(wrong)
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ExecutorError, match="nobody answers at Ray address 127.0.0.1"):
            ray_executor._check_address(f"127.0.0.1:{taken.getsockname()[1]}")
