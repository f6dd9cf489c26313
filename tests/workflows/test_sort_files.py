"""Sorting copies, moves, links and tags by predictions, overwrites nothing, and is taken back whole."""

import os
import shutil
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from conftest import tiny_backbone
from expect import expect_cli_error, expect_error
from photo_toys import photos
from protosteer.cli import main
from protosteer.data.image_files import images_below
from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.workflows import sort_files
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import learn_folder
from protosteer.workflows.sort_files import LOG, UNKNOWN, UNSURE, Sorter, SortOptions, folder_name, undo_sort, watch


@pytest.fixture(scope="module")
def learner(tmp_path_factory) -> Learner:
    learner = Learner(tiny_backbone(), Settings.preset("instant"))
    folder = photos(tmp_path_factory.mktemp("train") / "spring", ["ant", "bee"], per_class=12)
    learn_folder(learner, scan_folder(folder))
    return learner


@pytest.fixture
def camera(tmp_path) -> Path:
    """Images in one folder."""
    flat = tmp_path / "camera"
    flat.mkdir()
    for path in images_below(photos(tmp_path / "new", ["ant", "bee"], per_class=3, seed=1)):
        shutil.copy(path, flat / f"{path.parent.name} {path.name}")
    return flat


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def sort(learner: Learner, camera: Path, out: Path | None, **how) -> Sorter:
    sorter = Sorter(learner, camera, SortOptions(out, **how))
    sorter.sort(images_below(camera))
    return sorter


@pytest.mark.parametrize("mode", ["copy", "move", "link"])
def test_files_go_where_their_prediction_says_and_come_back(learner, camera, tmp_path, mode):
    out, before = tmp_path / "out", contents(camera)
    paths = images_below(camera)
    expected = {(label, path.name) for path, label in zip(paths, learner.predict(paths).labels, strict=True)}
    (camera / "bad.png").write_bytes(b"")
    sorter = sort(learner, camera, out, mode=mode, reject=None, xmp=True)
    assert {(p.parent.name, p.name) for p in images_below(out)} == expected and sorter.counts.side_files == 6
    assert [*sorter.counts.errors] == [str(camera / "bad.png")]
    assert len(images_below(camera)) == (1 if mode == "move" else 7)
    assert all(path.is_symlink() == (mode == "link") for path in images_below(out))
    (camera / "bad.png").unlink()
    assert undo_sort(out) == (6, [])
    assert contents(camera) == before and not list(out.iterdir())
    with expect_error("not-sorted", DataError, path=out):
        undo_sort(out)


def test_unsure_and_unknown_images_have_folders_of_their_own_and_no_tag(learner, camera, tmp_path):
    counts = sort(learner, camera, tmp_path / "a", at_least=1.0, reject=None, xmp=True).counts
    assert counts.folders == {UNSURE: 6} and counts.side_files == 0
    assert sort(learner, camera, tmp_path / "b", reject=0.999).counts.folders == {UNKNOWN: 6}


def test_nothing_is_overwritten_and_a_second_run_finds_nothing_new(learner, camera, tmp_path):
    out = tmp_path / "out"
    sort(learner, camera, out, reject=None)
    again = sort(learner, camera, out, reject=None).counts
    assert again.sorted_before == 6 and not again.folders
    name = images_below(camera)[0].name
    (camera / "later").mkdir()
    shutil.copy(images_below(camera)[1], camera / "later" / name)
    sort(learner, camera, out, reject=None)
    assert len(images_below(out)) == 7 and any(path.stem.endswith("(2)") for path in images_below(out))
    mine = images_below(out)[0]
    mine.write_bytes(b"changed since")
    taken_back, stay = undo_sort(out)
    assert taken_back == 6 and stay == [str(mine)] and mine.read_bytes() == b"changed since"


@pytest.mark.parametrize("mode", ["copy", "move", "link"])
def test_a_file_that_was_logged_and_not_yet_sorted_is_sorted_by_the_next_run(
    learner, camera, tmp_path, monkeypatch, mode
):
    out, names = tmp_path / "out", sorted(path.name for path in images_below(camera))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sort_files, "_place_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        sort(learner, camera, out, mode=mode, reject=None)
    assert (out / LOG).read_text().count("\n") == 1
    assert sort(learner, camera, out, mode=mode, reject=None).counts.sorted_before == 0
    assert sorted(path.name for path in images_below(out)) == names
    assert undo_sort(out) == (6, []) and sorted(path.name for path in images_below(camera)) == names


def test_images_are_tagged_in_place_and_other_programs_tags_stay(learner, camera):
    first, *others = images_below(camera)
    theirs = first.with_name(f"{first.name}.xmp")
    theirs.write_text("by another program")
    counts = sort(learner, camera, None, reject=None, xmp=True).counts
    assert counts.side_files == 5 and counts.other_side_files == 1 and theirs.read_text() == "by another program"
    labels = learner.predict(others).labels
    for path, label in zip(others, labels, strict=True):
        tree = ET.parse(path.with_name(f"{path.name}.xmp"))
        assert {li.text for li in tree.iter("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li")} == {label}
    undo_sort(camera)
    assert [path.name for path in camera.glob("*.xmp")] == [theirs.name]


def test_names_of_classes_are_folders_below_the_output():
    names = {"ant": "ant", "a/b": "a_b", "..": "_", ".git": "_git", UNKNOWN: f"{UNKNOWN}_", "a: b?": "a_ b_", " ": "_"}
    assert {name: folder_name(name) for name in names} == names


def test_a_log_cannot_reach_outside(learner, camera, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine.txt"
    sort(learner, camera, out, reject=None)
    mine.write_text("mine")
    line = (out / LOG).read_text().splitlines()[0].replace('"to": "', '"xmp": "../mine.txt", "to": "../')
    (out / LOG).write_text(f"{line}\ncut off")
    undo_sort(out)
    assert mine.read_text() == "mine"


def test_options_that_make_no_sense(learner, camera, tmp_path):
    with expect_error("unknown-mode", SettingsError):
        SortOptions(tmp_path, mode="burn")
    with expect_error("bad-probability", SettingsError):
        SortOptions(tmp_path, at_least=90)
    with expect_error("nothing-to-do", SettingsError):
        SortOptions(None)
    with expect_error("sort-into-itself", DataError):
        Sorter(learner, camera, SortOptions(camera))


def test_new_images_are_seen(tmp_path):
    pytest.importorskip("watchfiles")
    source, stop, found = tmp_path / "in", threading.Event(), []
    photos(tmp_path, ["ant"], per_class=1)
    source.mkdir()

    def copy():
        shutil.copy(tmp_path / "ant" / "00.png", source / "new.png")
        (source / "notes.txt").write_text("no image")

    writer = threading.Timer(0.3, copy)
    writer.start()
    for paths in watch(source, stop):
        found += paths
        stop.set()
    writer.join()
    assert [os.path.basename(path) for path in found] == ["new.png"]


def test_sort_as_a_user_calls_it(camera, tmp_path, capsys):
    model, out = tmp_path / "m.protosteer", tmp_path / "out"
    expect_cli_error("missing-argument", "sort", model, camera, camera, camera)
    expect_cli_error("not-sorted", "sort", out, "--undo")
    train = photos(tmp_path / "train", ["ant", "bee"])
    nano = tmp_path / "nano.protosteer"
    assert main(["learn", str(nano), str(train), "--preset", "instant", "--backbone", "nano"]) == 0
    assert main(["sort", str(nano), str(camera), str(out), "--xmp", "--reject", "0"]) == 0
    assert len(images_below(out)) == 6
    assert main(["sort", str(out), "--undo", "--json"]) == 0
    assert '"taken_back": 6' in capsys.readouterr().out
