"""The runner keeps every input that raises, crashes, hangs or takes too much, and survives it."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import fuzz

pytestmark = pytest.mark.slow


def reject(data: bytes) -> None:
    raise TypeError("no")


def work(seconds: float) -> None:
    """Use the processor."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("check", "limits", "message"),
    [
        (reject, {}, "TypeError no"),
        (lambda data: os.kill(os.getpid(), signal.SIGKILL), {}, "ended with -9"),
        (lambda data: time.sleep(60), {"SILENT": 3.0}, "hangs"),
        (lambda data: work(60), {"HUNG": 1.0}, "hangs"),
        (lambda data: work(0.3), {"SLOW": 0.2}, "it took"),
        (lambda data: None, {"LARGE": 0}, "taken"),
    ],
    ids=["raises", "crashes", "sleeps", "hangs", "slow", "large"],
)
def test_failures_are_kept(
    check: Callable[[bytes], None], limits: dict[str, float], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: Any,
) -> None:  # fmt: skip
    shared = fuzz.Shared(tmp_path / "current", *(fuzz.Context.Value(kind, 0) for kind in "QdQ"))
    parent = os.getpid()

    def clock() -> float:
        """The time of day until the first failure is written; then the end of all times, so that no test waits."""
        idle = os.getpid() != parent or not multiprocessing.active_children()
        return math.inf if shared.failed.value and idle else time.time()

    limits = {"SLOW": 60.0, "HUNG": 600.0, "SILENT": 600.0, "LARGE": 10**12} | limits
    for name, value in {
        **limits,
        "TESTS": tmp_path,
        "time": SimpleNamespace(time=clock, process_time=time.process_time),
    }.items():
        monkeypatch.setattr(fuzz, name, value)
    target = SimpleNamespace(seeds=lambda: [b"seed"], check=check, mutate=lambda data, random: data + b"!")
    fuzz.watch("odd", target, 1, time.time() + 3600, shared)
    (failure,) = (tmp_path / "fuzz" / "failures" / "odd").iterdir()
    assert failure.read_bytes() == b"seed!" and shared.failed.value >= 1
    assert message in capfd.readouterr().out


def test_all_targets_are_found_and_differ_from_their_seeds() -> None:
    known = fuzz.targets()
    assert {"images", "cifar", "pth", "npz", "safetensors", "stdin", "lists", "toml"} <= known.keys()
    for target in known.values():
        seeds = target.seeds()
        made = [target.mutate(seed, Random(number)) for seed in seeds for number in range(5)]
        assert set(made) - set(seeds)
