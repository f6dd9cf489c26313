"""All measurements in one run: names, order, JSON, text."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from protosteer.bench import report
from protosteer.bench.harness import Ratio
from protosteer.bench.report import as_json, run_all, table
from protosteer.cli.benchmarks import bench
from protosteer.errors import SettingsError

pytestmark = pytest.mark.slow

LONG = "a sentence that goes on and on, as such sentences do, until no terminal is wide enough to hold it in one line"
RATIOS = [
    Ratio("predict", "limit / ours", [0.97, 1.0], [1.0, 1.0], 0.95, ["[bold]12.3[/bold] images/s", LONG]),
    Ratio("late_training_k10", "this way / that way", [1.0], [2.0], 1.0),
]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three subjects: two ratios, one that is not installed, and one that tells how often it was repeated."""

    modules = {
        "first": Mock(return_value=RATIOS),
        "second": Mock(side_effect=ImportError("it needs an extra")),
        "third": lambda repeats: [Ratio("third", "", [float(repeats)], [1.0], 1.0)],
    }
    monkeypatch.setattr(report, "SUBJECTS", tuple(modules))
    for name, run in modules.items():
        monkeypatch.setitem(sys.modules, f"protosteer.bench.{name}", SimpleNamespace(run=run))
    return []


def test_subjects_run_once_each_in_order_and_a_missing_extra_is_told(messages: list[str]) -> None:
    ratios = run_all(None, 4, messages.append)
    assert [r.name for r in ratios] == ["predict", "late_training_k10", "third"] and ratios[-1].value == 4
    first, second, third = (f"measuring {name} ..." for name in ("first", "second", "third"))
    assert messages == [first, second, "second is left out: it needs an extra", third]
    messages.clear()
    assert len(run_all(["third", "first", "third"], 1, messages.append)) == 3
    assert messages == [first, third]


def test_what_cannot_be_measured_is_refused_before_anything_runs(messages: list[str]) -> None:
    told = "^nothing to measure is called 'fourth'; choose from first, second, third$"
    with pytest.raises(SettingsError, match=told):
        run_all(["first", "fourth"], 1, messages.append)
    with pytest.raises(SettingsError, match="^repeats = 0: must be at least 1$"):
        run_all(None, 0, messages.append)
    assert not messages


def test_help_names_every_subject_and_each_can_be_measured() -> None:
    told = inspect.signature(bench).parameters["subjects"].annotation
    assert f"Of {', '.join(report.SUBJECTS)}." in told
    for name in report.SUBJECTS:
        assert callable(importlib.import_module(f"protosteer.bench.{name}").run)


def test_json_has_ratios_notes_and_machine() -> None:
    figures = json.loads(json.dumps(as_json(RATIOS)))
    assert list(figures["ratios"]) == ["predict", "late_training_k10"]
    assert figures["ratios"]["predict"] == pytest.approx({"value": 0.985, "target": 0.95, "spread": 0.03})
    assert figures["notes"] == {"predict": RATIOS[0].notes, "late_training_k10": []}
    assert figures["machine"]["processor"] and figures["versions"]["torch"] and figures["threads"]


def test_the_table_fits_and_is_plain_text_in_a_file() -> None:
    file = io.StringIO()
    Console(file=file, width=60).print(*table(RATIOS), sep="\n")
    shown = file.getvalue()
    assert "\x1b" not in shown and max(map(len, shown.splitlines())) <= 60
    flat = " ".join(shown.split())
    assert "predict 0.98 0.95 0.03 yes late_training_k10 0.50 1.00 0.00 no" in flat
    assert "predict: limit / ours" in flat and "late_training_k10: this way / that way" in flat
    assert "[bold]12.3[/bold] images/s" in flat and LONG in flat  # not taken for markup
    assert flat.index("Absolute figures hold for this machine: ") < flat.index(", torch ")
