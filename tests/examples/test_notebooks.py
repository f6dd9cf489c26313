"""The notebooks run from top to bottom, cell by cell, and show what their text says."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from conftest import REPOSITORY

pytestmark = pytest.mark.slow


def run(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": name}
    cells = json.loads((REPOSITORY / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "clear the outputs before you commit"
            exec(compile("".join(cell["source"]), f"{name}.ipynb, cell {number}", "exec", dont_inherit=True), names)
    return names


def test_the_first_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names = run("first_model")
    assert names["accuracy"] > 0.8 and abs(names["confidence"].mean() - names["accuracy"]) < 0.1
    assert sum(names["unknown"]) > 10 and names["corrected"] > 0
    assert len(names["again"].classes) == 9


def test_cpp_step_by_step() -> None:
    names = run("cpp_step_by_step")
    assert names["by_hand"].item() == pytest.approx(names["by_library"].item(), abs=1e-5)
    assert min(names["scores"]) > 0.75
