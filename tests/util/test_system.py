"""What the machine is asked, and what its allocator is told."""

import platform
from types import SimpleNamespace

import pytest

from protosteer.util import system


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_glibc_takes_both_thresholds():
    assert system.keep_freed_memory()


def test_a_refusal_is_told(monkeypatch):
    monkeypatch.setattr(system.sys, "platform", "linux")
    for refused in (system._M_MMAP_THRESHOLD, system._M_TRIM_THRESHOLD):
        libc = SimpleNamespace(mallopt=lambda which, value, refused=refused: int(which != refused))
        monkeypatch.setattr(system.ctypes, "CDLL", lambda name, libc=libc: libc)
        assert system.keep_freed_memory() is False


@pytest.mark.parametrize(
    ("platform", "library"),
    [("darwin", lambda name: pytest.fail("not to be called")), ("linux", lambda name: object())],
)
def test_systems_without_mallopt_are_left_alone(monkeypatch, platform, library):
    monkeypatch.setattr(system.sys, "platform", platform)
    monkeypatch.setattr(system.ctypes, "CDLL", library)
    assert system.keep_freed_memory() is False


def test_the_processor_has_a_name():
    assert system.processor_name().strip()


def test_memory_is_told_where_the_system_tells_it(monkeypatch):
    assert 2**28 < system.memory_size() < 2**50
    monkeypatch.delattr(system.os, "sysconf")
    assert system.memory_size() == float("inf")
