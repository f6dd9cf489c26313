"""`protosteer correct`: what is said, written, listed and taken back."""

import json
from pathlib import Path

import pytest

from photo_toys import photos
from protosteer.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "m.protosteer"
    folder = photos(tmp_path / "spring", ["ant", "bee"], 6)
    assert main(["learn", str(path), str(folder), "--preset", "instant", "--device", "cpu", "--json"]) == 0
    capsys.readouterr()
    return path


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    return [str(path) for path in sorted((photos(tmp_path / "new", ["ant"], 3, seed=9) / "ant").iterdir())]


def correct(*words: object) -> int:
    return main(["correct", *map(str, words)])


def test_a_correction_is_told_listed_and_taken_back_to_the_bit(model, images, capsys):
    before = model.read_bytes()
    assert correct(model, images[0], "yak") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{images[0]}: ") and f"protosteer correct {model} --undo" in shown.err
    assert correct(model, images[1], "bee", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["taken_for"], told["class"], told["answer"], told["new_class"]) == ("ant", "bee", "bee", False)
    assert correct(model, "--log") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if ".png" in line]
    assert [row[1:] for row in rows] == [["00.png", "ant", "yak"], ["01.png", "ant", "bee"]]
    assert correct(model, images[0], "--undo") == 0 and "00.png as yak" in capsys.readouterr().out
    assert correct(model, "--undo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["taken_back"]["class"] == "bee"
    assert model.read_bytes() == before
    assert correct(model, "--log", "--json") == 0 and json.loads(capsys.readouterr().out) == {"corrections": []}
    assert main(["inspect", str(model)]) == 0 and "Corrected" not in capsys.readouterr().out


def test_corrections_are_one_line_of_what_a_model_holds(model, images, capsys):
    for image in images:
        assert correct(model, image, "bee") == 0
    capsys.readouterr()
    assert main(["inspect", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "Corrected" in shown and "3 images" in shown and "correction-" not in shown
