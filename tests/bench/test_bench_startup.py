"""Start-up is measured in children."""

from __future__ import annotations

import pytest

from protosteer.bench import startup

pytestmark = pytest.mark.slow


def test_help_is_measured_and_seen_to_import_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "TORCH", ("-c", "import time; time.sleep(0.5)"))  # importing it takes longer
    (ratio,) = startup.run(1)
    assert ratio.name == "help" and ratio.target == 1.0
    assert "Python alone 0." in ratio.notes[0]
    assert ratio.notes[1] == "--help does not import torch"


@pytest.mark.parametrize(
    "before, note",
    [
        ("import sys; sys.modules['torch'] = sys", "--help imports torch"),
        ("raise SystemExit(4)", "--help failed with exit code 4"),
    ],
)
def test_the_note_tells_what_was_seen(monkeypatch: pytest.MonkeyPatch, before: str, note: str) -> None:
    for name in ("TORCH", "HELP"):
        monkeypatch.setattr(startup, name, startup.NOTHING)
    monkeypatch.setattr(startup, "_LOOK", f"{before}\n{startup._LOOK}")
    assert startup.run(1)[0].notes[1] == note
