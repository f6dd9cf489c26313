"""A run that is killed at any moment and resumed ends in the same bits as one that was left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not k.endswith("_seconds")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def results(folder: Path) -> dict[str, Any]:
    """Contents of all files that hold results, by name; times left out."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".json" and path.name != "manifest.json":
            found[name] = without_times(json.loads(path.read_text()))
        elif path.name not in ("log.txt", "manifest.json"):
            found[name] = path.read_bytes()
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="killing children needs fork")
def test_killed_runs_end_in_the_same_bits(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "killed_run.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    killed, states = map(int, done.stdout.split())
    assert killed >= 24 and states >= 6, "all kills hit the same stage"
    whole = results(tmp_path / "whole")
    assert {"seed-0/matrix.csv", "seed-1/task-03.protosteer", "metrics.json"} <= whole.keys()
    for folder in (tmp_path / "killed").iterdir():
        pieced = results(folder)
        assert whole.keys() == pieced.keys() and [name for name in whole if whole[name] != pieced[name]] == []
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("unfinished"))
