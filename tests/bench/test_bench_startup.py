"""Start-up is measured in children."""

from __future__ import annotations

import subprocess

import pytest

from protosteer.bench import startup

pytestmark = pytest.mark.slow


def test_help_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "SIDES", {"torch": ("-c", "pass"), "help": startup.SIDES["help"]})
    (ratio,) = startup.run(1)
    assert ratio.name == "help" and ratio.value < 1 and ratio.notes[0].startswith("import torch 0.")
    monkeypatch.setitem(startup.SIDES, "torch", ("-c", "raise SystemExit(4)"))
    with pytest.raises(subprocess.CalledProcessError):  # a side that fails is not quick
        startup.run(1)
