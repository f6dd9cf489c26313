"""The runner keeps every input that raises, crashes, hangs or takes too much, and survives it."""

from __future__ import annotations

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


def refuse(data: bytes) -> None:
    raise TypeError("no")


def crash(data: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(data: bytes) -> None:
    time.sleep(60)


def dawdle(data: bytes) -> None:
    time.sleep(0.3)


def fine(data: bytes) -> None:
    pass


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (refuse, "TypeError no"),
        (crash, "ended with -9"),
        (hang, "hangs"),
        (dawdle, "it took"),
        (fine, "taken"),
    ],
)
def test_failures_are_kept(
    check: Callable[[bytes], None], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(fuzz, "TESTS", tmp_path)
    monkeypatch.setattr(fuzz, "SLOW", 0.2)
    monkeypatch.setattr(fuzz, "HUNG", 0.5)
    monkeypatch.setattr(fuzz, "LARGE", 0 if check is fine else 10**12)
    target = SimpleNamespace(seeds=lambda: [b"seed"], check=check, mutate=lambda data, random: data + b"!")
    shared = fuzz.Shared(tmp_path / "current", *(fuzz.Context.Value(kind, 0) for kind in "QdQ"))
    fuzz.watch("odd", target, 1, time.time() + 0.4, shared)
    (kept,) = (tmp_path / "fuzz" / "failures" / "odd").iterdir()
    assert kept.read_bytes() == b"seed!" and shared.failed.value >= 1
    assert told in capfd.readouterr().out


def test_all_targets_are_found_and_differ_from_their_seeds() -> None:
    known = fuzz.targets()
    assert {"images", "cifar", "pth", "npz", "safetensors", "stdin", "lists", "toml"} <= known.keys()
    for target in known.values():
        seeds = target.seeds()
        made = [target.mutate(seed, Random(number)) for seed in seeds for number in range(5)]
        assert set(made) - set(seeds)
