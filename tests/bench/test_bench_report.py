"""All measurements in one run: names, order, JSON, text."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from protosteer.bench import report
from protosteer.bench.report import as_json, run_all, table
from protosteer.bench.timing import Ratio
from protosteer.cli.benchmarks import bench
from protosteer.errors import SettingsError

pytestmark = pytest.mark.slow

LONG = "a sentence that goes on and on, as such sentences do, until no terminal is wide enough to hold it in one line"
RATIOS = [
    Ratio("predict", "limit / ours", 0.97, 0.95, 0.031, ["[bold]12.3[/bold] images/s", LONG]),
    Ratio("late_training_k10", "this way / that way", 0.5, 1.0, 0.1),
]


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three subjects: two ratios, none, and one that tells how often it was repeated."""

    def counted(repeats: int) -> list[Ratio]:
        return [Ratio("third", "", float(repeats), 1.0, 0.0)]

    modules = {"first": lambda _: RATIOS, "second": lambda _: [], "third": counted}
    monkeypatch.setattr(report, "SUBJECTS", tuple(modules))
    for name, run in modules.items():
        monkeypatch.setitem(sys.modules, f"protosteer.bench.{name}", SimpleNamespace(run=run))


def test_all_subjects_run_in_order(subjects: None) -> None:
    messages: list[str] = []
    ratios = run_all(None, 4, messages.append)
    assert [ratio.name for ratio in ratios] == ["predict", "late_training_k10", "third"]
    assert ratios[-1].value == 4
    assert messages == [
        "measuring first ...",
        "measuring second ...",
        "second: nothing to measure on this machine",
        "measuring third ...",
    ]


def test_some_subjects_run_once_each_and_in_the_same_order(subjects: None) -> None:
    messages: list[str] = []
    assert len(run_all(["third", "first", "third"], 1, messages.append)) == 3
    assert messages == ["measuring first ...", "measuring third ..."]


def test_an_unknown_subject_is_refused_before_anything_runs(subjects: None) -> None:
    messages: list[str] = []
    with pytest.raises(SettingsError) as error:
        run_all(["first", "fourth"], 1, messages.append)
    assert str(error.value) == "nothing to measure is called 'fourth'; choose from first, second, third"
    assert not messages


def test_repeats_must_be_positive(subjects: None) -> None:
    with pytest.raises(SettingsError, match="repeats = 0: must be at least 1"):
        run_all(None, 0, print)


def test_help_names_every_subject_and_each_can_be_measured() -> None:
    told = inspect.signature(bench).parameters["subjects"].annotation
    assert f"Of {', '.join(report.SUBJECTS)}." in told
    assert all(
        hasattr(importlib.import_module(f"protosteer.bench.{name}"), "run") for name in report.SUBJECTS
    )


def test_json_has_ratios_notes_and_machine() -> None:
    figures = json.loads(json.dumps(as_json(RATIOS)))
    assert figures["ratios"]["predict"] == {"value": 0.97, "target": 0.95, "spread": 0.031}
    assert list(figures["ratios"]) == list(figures["notes"]) == ["predict", "late_training_k10"]
    assert figures["notes"] == {"predict": RATIOS[0].notes, "late_training_k10": []}
    assert set(figures["machine"]) == {"cpu", "cores", "threads", "torch", "python", "platform"}
    assert all(figures["machine"].values())


def text(width: int) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width)
    for part in table(RATIOS):
        console.print(part)
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 240])
def test_the_table_fits_and_is_plain_text_in_a_file(width: int) -> None:
    shown = text(width)
    lines = shown.splitlines()
    assert "\x1b" not in shown
    assert max(len(line) for line in lines) <= width
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()[-1:] in (["yes"], ["no"])}
    assert rows == {
        "predict": ["0.97", "0.95", "0.03", "yes"],
        "late_training_k10": ["0.50", "1.00", "0.10", "no"],
    }
    assert "predict: limit / ours" in shown and "late_training_k10: this way / that way" in shown
    assert "[bold]12.3[/bold] images/s" in shown  # not taken for markup
    assert " ".join(LONG.split()[-3:]) in " ".join(shown.split())
    assert "torch" in lines[-1] or "torch" in lines[-2] or "torch" in lines[-3]
