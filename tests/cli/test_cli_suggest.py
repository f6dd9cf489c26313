"""`protosteer suggest` as a person types it."""

import csv
import json
from pathlib import Path

import pytest

from expect import run_cli
from photo_toys import photos
from protosteer.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("suggest")
    photos(root / "spring", ["ant", "bee"], 10)
    photos(root / "new", ["ant", "bee", "yak"], 4, seed=5)
    (root / "new" / "twin.png").write_bytes((root / "new" / "ant" / "00.png").read_bytes())
    (root / "new" / "broken.png").write_bytes(b"no image")
    assert main(["learn", str(root / "m.protosteer"), str(root / "spring"), "--preset", "instant"]) == 0
    return root


def test_a_table_and_what_to_do_next(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (place / "m.protosteer").read_bytes()
    out, err = run_cli(capsys, "suggest", place / "m.protosteer", place / "new", "--count", "3")
    assert out.startswith("13 images: 3 ") and f"copy of {place / 'new' / 'ant' / '00.png'}" in out
    assert "warning: " in err and "broken.png" in err
    assert "protosteer learn" in err.splitlines()[-1] and (place / "m.protosteer").read_bytes() == before


def test_json_and_a_file_hold_the_same_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["suggest", str(place / "m.protosteer"), str(place / "new"), "--count", "3"]
    told = json.loads(run_cli(capsys, *words, "--json").out)
    assert told["images"] == 13 and told["found"]["label"] == 3 and told["found"]["duplicate"] == 1
    out = place / "rows.csv"
    assert main([*words, "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == [row["path"] for row in told["rows"]]
    assert [row["why"] for row in rows] == [row.get("why", "") for row in told["rows"]]
    assert "label" not in rows[0] and rows[-1]["error"]


def test_parquet_has_the_same_columns(place: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    out = place / "rows.parquet"
    assert main(["suggest", str(place / "m.protosteer"), str(place / "new"), "--out", str(out)]) == 0
    table = parquet.read_table(out)
    assert table.column_names == ["path", "why", "guess", "probability", "other", "error"]


def test_labels_that_may_be_wrong(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = photos(place / "again", ["ant", "bee"], 10)
    (folder / "ant" / "03.png").rename(folder / "bee" / "stray.png")
    out, err = run_cli(capsys, "suggest", place / "m.protosteer", "--check", folder, "--count", "1")
    assert out.startswith("20 images: ") and "stray.png" in out and err
