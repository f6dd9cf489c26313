"""Mistakes that would pass in silence: they are named, and the right command is proposed."""

import json
import shutil
from pathlib import Path

import pytest

from expect import expect_cli_error, run_cli
from photo_toys import photos
from protosteer.cli import main
from protosteer.model import file as model_file


@pytest.fixture(scope="module")
def years(tmp_path_factory) -> Path:
    """Months that hold classes."""
    root = tmp_path_factory.mktemp("years") / "photos"
    photos(root / "january", ["tiger lily", "bee"], per_class=4)
    photos(root / "february", ["cow"], per_class=4)
    return root


def run(*words: object) -> int:
    return main([*map(str, words), *(["--backbone", "nano"] if words[0] == "learn" else [])])


@pytest.fixture
def shop(years, tmp_path) -> Path:
    path = tmp_path / "shop.protosteer"
    assert run("learn", path, years / "january", "--preset", "instant") == 0
    return path


def test_months_are_classes_only_if_that_is_wanted(years, tmp_path):
    path = tmp_path / "shop.protosteer"
    said = expect_cli_error("nested-folders", "learn", path, years, path=years)
    assert f"{years}/february {years}/january" in said and not path.exists()
    assert run("learn", path, years, "--preset", "instant", "--yes") == 0
    assert model_file.read(path).memory.classes == ["february", "january"]


def test_a_dry_run_warns_of_months(years, tmp_path, capsys):
    assert run("learn", tmp_path / "shop", years, "--preset", "instant", "--dry-run") == 0
    assert "warning: " in capsys.readouterr().err


def test_similar_names_are_asked_about(shop, tmp_path, capsys):
    more = photos(tmp_path / "more", ["Tiger Lily"], per_class=4, seed=5)
    assert run("learn", shop, more) == 0
    assert "class 'Tiger Lily': did you mean 'tiger lily'?" in capsys.readouterr().err
    shown = run_cli(capsys, "correct", shop, more / "Tiger Lily" / "00.png", "tiger-lilly", "--json")
    assert json.loads(shown.out)["similar_class"] == "tiger lily" and "--undo" in shown.err
    said = expect_cli_error("unknown-class", "forget", shop, "tiger lilly", name="tiger lilly")
    assert "did you mean 'tiger lily'?" in said


def test_predict_names_what_it_skips(shop, years, tmp_path, capsys):
    folder = tmp_path / "new"
    shutil.copytree(years / "february", folder)
    for name in ("clip.mp4", "notes.txt"):
        (folder / name).write_bytes(b"x")
    said = run_cli(capsys, "predict", shop, folder).err
    assert "skipped 1 file (video)" in said and "skipped 1 file (not an image)" in said


def test_too_few_images_for_a_rejection_are_said(shop, years, capsys):
    shown = run_cli(capsys, "predict", shop, years / "february", "--reject", "0.05", "--json")
    assert "no image will be called unknown" in shown.err and '"unknown": false' in shown.out
