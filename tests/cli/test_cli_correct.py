"""`protosteer correct`: what is said, written, listed and taken back."""

import functools
import json
from pathlib import Path

import pytest

from expect import run_cli
from photo_toys import photos

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "m.protosteer"
    folder = photos(tmp_path / "spring", ["ant", "bee"], 6)
    run_cli(capsys, "learn", path, folder, "--preset", "instant", "--device", "cpu", "--json")
    return path


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    return [str(path) for path in sorted((photos(tmp_path / "new", ["ant"], 3, seed=9) / "ant").iterdir())]


def test_a_correction_is_told_listed_and_taken_back_to_the_bit(model, images, capsys):
    before = model.read_bytes()
    correct = functools.partial(run_cli, capsys, "correct", model)
    shown = correct(images[0], "yak")
    assert shown.out.startswith(f"{images[0]}: ") and f"protosteer correct {model} --undo" in shown.err
    told = json.loads(correct(images[1], "bee", "--json").out)
    assert (told["taken_for"], told["class"], told["answer"], told["new_class"]) == ("ant", "bee", "bee", False)
    rows = [line.split() for line in correct("--log").out.splitlines() if ".png" in line]
    assert [row[1:] for row in rows] == [["00.png", "ant", "yak"], ["01.png", "ant", "bee"]]
    assert "00.png as yak" in correct(images[0], "--undo").out
    assert json.loads(correct("--undo", "--json").out)["taken_back"]["class"] == "bee"
    assert model.read_bytes() == before
    assert json.loads(correct("--log", "--json").out) == {"corrections": []}
    assert "Corrected" not in run_cli(capsys, "inspect", model).out


def test_corrections_are_one_line_of_what_a_model_holds(model, images, capsys):
    for image in images:
        run_cli(capsys, "correct", model, image, "bee")
    shown = run_cli(capsys, "inspect", model).out
    assert "Corrected" in shown and "3 images" in shown and "correction-" not in shown
