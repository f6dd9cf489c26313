"""Lists of images with labels, in three formats; each mistake is told in one line with its place."""

import json
from pathlib import Path

import pytest

from expect import expect_error
from protosteer.data.class_folders import read_folder
from protosteer.data.image_lists import is_list, read_paths, read_table
from protosteer.data.sources import image_paths, read_labelled
from protosteer.errors import DataError
from set_toys import save

Pairs = list[tuple[object, object]]
PAIRS: Pairs = [("dog/b.png", "dog"), ("cat/a.png", "cat"), ("cat/c.png", "cat")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, _ in PAIRS:
        save(tmp_path / str(name))
    return tmp_path


def write(path: Path, pairs: Pairs) -> Path:
    if path.suffix == ".csv":
        path.write_text("label,path,note\n" + "".join(f"{label},{name},x\n" for name, label in pairs))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"path": n, "label": label}) + "\n\n" for n, label in pairs))
    else:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        names, labels = zip(*pairs, strict=True)
        pyarrow.parquet.write_table(pa.table({"path": names, "label": labels}), path)
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_list_is_read_as_the_folder_that_its_images_lie_in(folder, suffix, monkeypatch):
    path = write(folder / f"list.{suffix}", PAIRS)
    assert is_list(path) and not is_list(folder)
    for place in (folder, folder.parent):
        monkeypatch.chdir(place)
        assert read_labelled(path) == read_folder(folder)
    assert image_paths(path) == [folder / str(name) for name, _ in PAIRS]
    assert read_labelled(path, ["dog"]) == read_folder(folder, ["dog"])
    with expect_error("missing-class", DataError):
        read_labelled(path, ["dog", "fox"])


def test_paths_may_be_whole_or_those_of_the_current_folder(folder, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    whole = write(elsewhere / "whole.csv", [(folder / str(name), label) for name, label in PAIRS])
    assert read_table(whole) == read_folder(folder)
    here = write(elsewhere / "here.csv", PAIRS)
    monkeypatch.chdir(folder)
    assert read_table(here) == read_folder(Path("."))
    monkeypatch.chdir(folder.parent)
    with expect_error("missing-file", DataError):
        read_table(here)
    assert read_paths(here) == [elsewhere / str(name) for name, _ in PAIRS]  # whoever reads them will tell


def test_numbers_are_labels_too(folder):
    assert read_table(write(folder / "x.jsonl", [("dog/b.png", 7), ("cat/a.png", 10)])).labels == ["10", "7"]
    assert read_table(write(folder / "x.parquet", [("dog/b.png", 7)])).labels == ["7"]


@pytest.mark.parametrize(
    "text, told",
    [
        ("file,label\na.png,cat\n", "missing-column"),
        ("path,class\na.png,cat\n", "missing-column"),
        ("", "missing-column"),
        ("path,label\n", "no-images"),
        ("label,path\ncat\n", "bad-list"),
        ("path,label\ncat/a.png,cat\ncat/c.png\n", "bad-label"),
        ("path,label\ncat/a.png,cat\n./cat/a.png,cat\n", "repeated-image"),
        ("path,label\ncat/a.png,cat\ncat/x.png,cat\n", "missing-file"),
    ],
)
def test_mistakes_in_csv_are_told_with_their_place(folder, text, told):
    (folder / "x.csv").write_text(text)
    with expect_error(told, DataError) as caught:
        read_table(folder / "x.csv")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line, told",
    [
        ('{"path": "cat/a.png"', "bad-list"),
        ("[1]", "bad-list"),
        ('{"path": "cat/a.png"}', "missing-column"),
        ('{"path": "cat/a.png", "label": 0.5}', "bad-label"),
        ('{"path": "cat/a.png", "label": true}', "bad-label"),
        ('{"path": 3, "label": "cat"}', "bad-list"),
        ("[" * 100_000, "bad-list"),
    ],
)
def test_mistakes_in_lines_of_json(folder, line, told):
    (folder / "x.jsonl").write_text(line)
    with expect_error(told, DataError):
        read_table(folder / "x.jsonl")


def test_a_broken_parquet_file_is_told(folder):
    path = write(folder / "x.parquet", PAIRS)
    path.write_bytes(path.read_bytes()[:-9])
    with expect_error("bad-list", DataError):
        read_table(path)
