"""Freed memory: what the system's allocator is told."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest

from protosteer.util import system as allocator


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_glibc_takes_both_thresholds():
    assert allocator.keep_freed_memory()


def test_a_refusal_is_told(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    for refused in (allocator._M_MMAP_THRESHOLD, allocator._M_TRIM_THRESHOLD):
        libc = SimpleNamespace(mallopt=lambda which, value, refused=refused: int(which != refused))
        monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name, libc=libc: libc)
        assert allocator.keep_freed_memory() is False


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: pytest.fail("not to be called"))
    assert allocator.keep_freed_memory() is False


def test_a_system_without_mallopt_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert allocator.keep_freed_memory() is False
