"""`learn`, `predict` and `embed` with lists and saved image sets, as a person types them."""

import csv
import json
from pathlib import Path

import pytest

from expect import expect_cli_error, run_cli
from photo_toys import photos
from protosteer.cli import main
from protosteer.data.class_folders import read_folder
from protosteer.model.file import read
from set_toys import save_set

pytestmark = pytest.mark.slow


QUICK = ["--preset", "instant"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return photos(Path("photos"), ["ant", "bee"], 6)


def write_list(path: Path, folder: Path) -> Path:
    files = read_folder(folder)
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *zip(files.paths, files.labels, strict=True)])
    return path


def test_a_list_is_learned_and_a_list_is_predicted(folder, capsys):
    write_list(Path("spring.csv"), folder)
    write_list(Path("lists/here.csv"), folder)  # its paths are those of the current folder
    told = json.loads(run_cli(capsys, "learn", "x.protosteer", "spring.csv", *QUICK, "--json").out)
    assert told["task"]["name"] == "spring" and told["found"]["classes"] == {"ant": 6, "bee": 6}
    assert read(Path("x.protosteer")).memory.classes == ["ant", "bee"]
    for name in ("spring.csv", "lists/here.csv"):
        assert main(["predict", "x.protosteer", name, "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["label"] for row in rows] == ["ant"] * 6 + ["bee"] * 6
    assert main(["predict", "x.protosteer", "spring.csv", "--out", "out.jsonl"]) == 0
    assert main(["embed", "x.protosteer", "out.jsonl", "--out", "out.csv"]) == 0
    assert len(Path("out.csv").read_text().splitlines()) == 13


def test_several_lists_and_folders_are_a_task_each(folder, capsys):
    write_list(Path("a.csv"), photos(Path("more"), ["cat", "dog"], 6))
    assert main(["learn", "x.protosteer", "photos", "a.csv", *QUICK]) == 0
    assert read(Path("x.protosteer")).memory.task_names == ["photos", "a"]


def test_a_saved_set_is_learned_and_one_of_its_images_predicted(folder, capsys):
    pytest.importorskip("pyarrow", reason="image sets in Arrow files need pyarrow")
    files = read_folder(folder)
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in files.paths]
    save_set(Path("pets"), images, files.labels)
    run_cli(capsys, "learn", "x.protosteer", "pets", *QUICK)
    row = json.loads(run_cli(capsys, "predict", "x.protosteer", "pets/data-00000-of-00001.arrow/7", "--json").out)
    assert row["label"] == "bee" and row["path"] == "pets/data-00000-of-00001.arrow/7"
    assert main(["embed", "x.protosteer", "pets", "photos", "--out", "out.csv"]) == 0
    with Path("out.csv").open(newline="") as file:
        sums = [line["sha256"] for line in csv.DictReader(file)]
    assert len(set(sums[:12])) == 12 and sums[:12] == sums[12:]


def test_a_bad_list_is_refused_in_a_line_before_anything_is_written(folder):
    Path("x.csv").write_text("path,label\nphotos/ant/00.png,ant\nphotos/ant/99.png,ant\n")
    said = expect_cli_error(None, "learn", "x.protosteer", "x.csv", *QUICK)
    assert "x.csv" in said and "line 3" in said and not Path("x.protosteer").exists()
