"""`forget --certificate` says what was removed, and `verify` proves it."""

import json
import shutil
from pathlib import Path

import pytest

from expect import expect_cli_error
from photo_toys import photos
from protosteer.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("certificate")
    for name, classes in {"spring": ["ant", "bee", "cow"], "summer": ["dog"]}.items():
        photos(root / name, classes, per_class=5)
        words = ["--preset", "instant", "--independent", "--backbone", "nano"]
        assert main(["learn", str(root / "shop.protosteer"), str(root / name), *words]) == 0
    shutil.copy(root / "shop.protosteer", root / "old.protosteer")
    words = ["forget", str(root / "shop.protosteer"), "bee", "--certificate", str(root / "c.json")]
    assert main(words) == 0
    return root


def checks(capsys, *words: object) -> list[tuple[bool | None, str]]:
    capsys.readouterr()
    assert main(["verify", *map(str, words), "--json"]) == 0
    return [(one["passed"], one["check"]) for one in json.loads(capsys.readouterr().out)["checks"]]


def test_what_is_left_is_learned_again_to_the_bit(place, capsys):
    certificate = json.loads((place / "c.json").read_text())
    assert certificate["exact"] and [one["class"] for one in certificate["removed"]] == ["bee"]
    found = checks(capsys, place / "c.json", place / "shop.protosteer", place / "spring", place / "summer")
    assert [passed for passed, _ in found] == [True] * 4


def test_a_model_that_has_not_forgotten_is_found_out(place, tmp_path, capsys):
    expect_cli_error("not-verified", "verify", place / "c.json", place / "old.protosteer")
    renamed = tmp_path / "renamed.protosteer"
    shutil.copy(place / "old.protosteer", renamed)
    assert main(["rename", str(renamed), "bee", "wasp"]) == 0  # another name hides nothing
    expect_cli_error("not-verified", "verify", place / "c.json", renamed)
    other = photos(tmp_path / "spring", ["ant", "cow"], per_class=5, seed=3)
    expect_cli_error("not-verified", "verify", place / "c.json", place / "shop.protosteer", other)


def test_later_changes_are_said_and_other_folders_are_not_checked(place, tmp_path, capsys):
    later = tmp_path / "later.protosteer"
    shutil.copy(place / "shop.protosteer", later)
    assert main(["rename", str(later), "cow", "calf"]) == 0
    (same, _), (gone, _), (passed, _) = checks(capsys, place / "c.json", later, tmp_path / "winter")
    assert same and gone and passed is None


def test_certificates_that_are_none_or_changed(place, tmp_path):
    changed = tmp_path / "c.json"
    changed.write_text((place / "c.json").read_text().replace('"bee"', '"wasp"'))
    expect_cli_error("changed-certificate", "verify", changed, place / "shop.protosteer", path=changed)
    changed.write_text("[1]")
    expect_cli_error("no-certificate", "verify", changed, place / "shop.protosteer")
    expect_cli_error("file-exists", "forget", place / "shop.protosteer", "ant", "--certificate", place / "c.json")
