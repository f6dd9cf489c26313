"""Peaks of memory: the measuring itself, and that what is measured is what it says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from protosteer.bench import memory
from protosteer.bench.subjects import small
from protosteer.errors import ProtosteerError

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(not memory._FORGET_PEAK.exists(), reason="no /proc here")


@linux
def test_the_rise_sees_what_is_freed_again_and_no_greater_peak_before():
    torch.ones(25_000_000)
    assert 35e6 < memory.rise(lambda: torch.ones(10_000_000).sum()) < 60e6


def test_images_are_made_when_asked_for_and_the_same_each_time():
    images, labels = memory.lazy_images(small(), 64)
    assert len(images) == len(labels) == 64 and len(set(labels)) == 64 // memory.PER_CLASS
    assert torch.equal(images.pixels([3, 40]), images.pixels([3, 40]))
    assert not torch.equal(images.pixels([3]), images.pixels([7]))  # one class, other noise


@pytest.mark.parametrize("kind", memory.KINDS)
@pytest.mark.filterwarnings("ignore::protosteer.errors.ProtosteerWarning")
def test_every_kind_does_what_it_says(kind):
    prepare, _ = memory.KINDS[kind]
    done = prepare(small(), 32)()
    if "learn" in kind:
        assert done.shape == (3, 1, 24) if kind == "bare-learn" else len(done.classes) == 2
    else:
        assert len(done) == 32


@linux
def test_a_child_prints_its_peak():
    # One image of 224 px in float32, and at least as much again for what becomes of it.
    assert 1e6 < memory.child_peak("bare-predict", 1) < 200e6


def test_a_child_that_fails_says_why(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\n  ...\nMemoryError: no more\n")
    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ProtosteerError, match="the memory of learn failed: MemoryError: no more; run -m"):
        memory.child_peak("learn", 1)


@linux
def test_ratios_are_of_peaks_with_the_embeddings_left_out(monkeypatch):
    peaks = {"bare-learn": 50e6, "learn": 100e6, "bare-predict": 30e6, "predict": 40e6}
    monkeypatch.setattr(memory, "child_peak", lambda kind, n: peaks.get(kind, 100e6 + 2 * n * 192 * 4))
    ratios = {ratio.name: ratio for ratio in memory.run(5)}
    assert {name: ratio.value for name, ratio in ratios.items()} == {
        "memory_learn": 0.5,
        "memory_predict": 0.75,
        "memory_learn_growth": 1.0,
    }
    assert ratios["memory_learn"].notes == ["50 MB against 100 MB"]


def test_nothing_is_measured_but_on_linux(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(memory, "_FORGET_PEAK", tmp_path / "none")
    assert memory.run(2) == []
