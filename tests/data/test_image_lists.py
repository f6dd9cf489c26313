"""Lists of images with labels, in three formats; each mistake is told in one line with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    with pytest.raises(DataError, match="has no images of class fox"):
        read_labelled(path, ["dog", "fox"])


def test_paths_may_be_whole_or_those_of_the_current_folder(folder, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    whole = write(elsewhere / "whole.csv", [(folder / str(name), label) for name, label in PAIRS])
    assert read_table(whole) == read_folder(folder)
    here = write(elsewhere / "here.csv", PAIRS)
    monkeypatch.chdir(folder)
    assert read_table(here) == read_folder(Path("."))
    monkeypatch.chdir(folder.parent)
    with pytest.raises(
        DataError, match=r"here.csv names files that are not there \(line 2: .*dog/b.png, line 3"
    ):
        read_table(here)
    assert read_paths(here) == [elsewhere / str(name) for name, _ in PAIRS]  # whoever reads them will tell


def test_numbers_are_labels_too(folder):
    assert read_table(write(folder / "x.jsonl", [("dog/b.png", 7), ("cat/a.png", 10)])).labels == ["10", "7"]
    assert read_table(write(folder / "x.parquet", [("dog/b.png", 7)])).labels == ["7"]


@pytest.mark.parametrize(
    "text, told",
    [
        ("file,label\na.png,cat\n", r"x.csv .* it has no column path; there are: file, label"),
        ("path,class\na.png,cat\n", r"x.csv .* it has no column label; there are: path, class"),
        ("", r"x.csv .* it has no column path; there are: none"),
        ("path,label\n", "x.csv lists no images"),
        ("label,path\ncat\n", "x.csv, line 2: column path has no file's name"),
        ("path,label\ncat/a.png,cat\ncat/c.png\n", "x.csv, line 3: the label is not there; give a word"),
        (
            "path,label\ncat/a.png,cat\n./cat/a.png,cat\n",
            r"more than once \(line 2 and line 3: .*cat/a.png\); leave one row of each",
        ),
        ("path,label\ncat/a.png,cat\ncat/x.png,cat\n", r"files that are not there \(line 3: .*cat/x.png\)"),
    ],
)
def test_mistakes_in_csv_are_told_with_their_place(folder, text, told):
    (folder / "x.csv").write_text(text)
    with pytest.raises(DataError, match=told) as caught:
        read_table(folder / "x.csv")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line, told",
    [
        ('{"path": "cat/a.png"', "cannot be read as a list of images"),
        ("[1]", "x.jsonl, line 1: this is no JSON object"),
        ('{"path": "cat/a.png"}', "it has no column label; there are: path"),
        ('{"path": "cat/a.png", "label": 0.5}', "x.jsonl, line 1: the label is 0.5; give a word"),
        ('{"path": "cat/a.png", "label": true}', "x.jsonl, line 1: the label is True; give a word"),
        ('{"path": 3, "label": "cat"}', "x.jsonl, line 1: column path has no file's name"),
        ("[" * 100_000, "cannot be read as a list of images"),
    ],
)
def test_mistakes_in_lines_of_json(folder, line, told):
    (folder / "x.jsonl").write_text(line)
    with pytest.raises(DataError, match=told):
        read_table(folder / "x.jsonl")


def test_a_broken_parquet_file_is_told(folder):
    path = write(folder / "x.parquet", PAIRS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="x.parquet cannot be read as a list of images"):
        read_table(path)
