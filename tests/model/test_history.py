"""Changes of a model file are logged, kept versions come back byte by byte, and forgetting reaches them."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from conftest import easy_task, tiny_backbone
from expect import expect_cli_error, expect_error
from protosteer.cli import main
from protosteer.errors import LearnerError, ModelFileError
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model import history
from protosteer.model.renaming import join, rename
from protosteer.model.transaction import transaction
from protosteer.model.unlearning import forget
from protosteer.settings import Settings

INSTANT = Settings.preset("instant")


@pytest.fixture
def learner() -> Learner:
    learner = Learner(tiny_backbone(), INSTANT)
    learner.learn(easy_task(["ant", "bee", "cow"], 6), "spring")
    learner.learn(easy_task(["dog", "bee"], 6, seed=1), "summer")
    return learner


@pytest.fixture
def path(learner: Learner, tmp_path: Path) -> Path:
    learner.save(tmp_path / "shop.protosteer")
    return tmp_path / "shop.protosteer"


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def classes(path: Path) -> list[str]:
    return model_file.read(path).memory.classes


def test_a_renamed_class_keeps_its_records(learner):
    images, _ = easy_task(["ant", "bee", "dog"], 4, seed=2)
    before = learner.predict(images)
    rename(learner.memory, "bee", "wasp")
    after = learner.predict(images)
    torch.testing.assert_close(after.probabilities.sort().values, before.probabilities.sort().values)
    assert after.labels == ["wasp" if label == "bee" else label for label in before.labels]
    assert learner.memory.owners["wasp"] == ["spring", "summer"]
    with expect_error("class-exists", LearnerError, name="cow"):
        rename(learner.memory, "ant", "cow")
    with expect_error("unknown-class", LearnerError, name="eel"):
        rename(learner.memory, "eel", "cow")


def test_joined_classes_are_one_class_of_several_tasks(learner):
    """As if the second class had been learned under the other's name, as a task of its own."""
    (pixels, labels), (more, _) = easy_task(["ant", "bee"], 6), easy_task(["cow"], 6, seed=3)
    twin, joined = Learner(tiny_backbone(), INSTANT), Learner(tiny_backbone(), INSTANT)
    twin.learn((pixels, labels), "a")
    twin.learn((more, ["ant"] * 6), "b")
    joined.learn((pixels, labels), "a")
    joined.learn((more, ["cow"] * 6), "b")
    join(joined.memory, ["ant", "cow"], "ant")
    images, _ = easy_task(["ant", "bee", "cow"], 4, seed=2)
    torch.testing.assert_close(joined.predict(images).scores, twin.predict(images).scores, rtol=1e-4, atol=1e-4)
    join(learner.memory, ["ant", "cow", "dog"], "pet")
    assert learner.classes == ["pet", "bee"] and learner.tasks == ["spring", "spring-2", "summer"]
    assert sum(task.images for task in learner.memory.tasks) == 30 and len(learner.predict(images)) == 12
    with expect_error("class-exists", LearnerError, name="bee"):
        join(learner.memory, ["pet", "pet"], "bee")


def test_rename_and_join_are_undone_byte_by_byte(path, capsys):
    first = path.read_bytes()
    run("join", path, "ant", "cow", "--as", "pet")
    assert classes(path) == ["pet", "bee", "dog"] and path.read_bytes() != first
    run("undo", path)
    assert path.read_bytes() == first and not history.versions_folder(path).exists()
    expect_cli_error("no-version", "undo", path)
    expect_cli_error("missing-argument", "join", path, "ant", "--as", "pet")
    expect_cli_error("unknown-class", "rename", path, "amt", "pet")
    capsys.readouterr()
    run("history", path, "--json")
    shown = json.loads(capsys.readouterr().out)
    assert [change["command"] for change in shown["changes"]] == ["join", "undo"]
    assert shown["changes"][0]["renamed"] == {"ant": "pet", "cow": "pet"} and shown["versions"] == []


def test_versions_are_kept_if_wanted_and_no_more_than_wanted(path):
    states = []
    run("history", path, "--keep-versions", 2)
    for name in ("one", "two", "three"):
        states.append(path.read_bytes())
        run("rename", path, classes(path)[0], name)
    assert len(history.versions(path)) == 2
    for expected in states[:0:-1]:
        run("undo", path)
        assert path.read_bytes() == expected
    with expect_error("no-version", ModelFileError):
        history.undo(path)
    run("rename", path, "bee", "wasp")
    run("history", path, "--keep-versions", 0)
    assert not history.versions(path)


def test_a_change_reads_the_last_line_of_the_log_and_uses_no_number_twice(path, monkeypatch):
    """So its cost does not grow with the log. A log of an earlier release, without numbers, is read whole once."""
    history.keep_versions(path, 2)
    for name in ("one", "two"):
        run("rename", path, classes(path)[0], name)
    lines = [json.loads(line) for line in history.beside(path).read_text().splitlines()]
    for line in lines:
        del line["last_version"]
    history.beside(path).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("undo", path)  # takes 000002 away
    monkeypatch.setattr(history, "read", None)
    run("rename", path, classes(path)[0], "three")
    assert [version.name for version in history.versions(path)] == ["000001.protosteer", "000003.protosteer"]
    monkeypatch.undo()
    entries, keep = history.read(path)
    assert [entry.version for entry in entries] == [f"{n:06}.protosteer" for n in (1, 2)] + [None, "000003.protosteer"]
    assert keep == 2
    history.beside(path).write_text("[" * 100_000)  # damaged
    run("rename", path, "three", "four")
    assert history.read(path)[1] == 0


def test_forgetting_reaches_versions_under_older_names_and_the_log(path, capsys):
    run("history", path, "--keep-versions", 9)
    run("rename", path, "bee", "wasp")
    run("join", path, "wasp", "cow", "--as", "herd")
    run("forget", path, "herd")
    assert "removed from 2 kept versions" in capsys.readouterr().err
    assert [classes(version) for version in history.versions(path)] == [["ant", "dog"], ["ant", "dog"]]
    log = history.beside(path).read_text()
    assert not any(name in log for name in ("bee", "wasp", "cow", "herd")) and history.FORGOTTEN in log
    run("undo", path)
    assert classes(path) == ["ant", "dog"]


def test_forgetting_a_task_reaches_versions(path):
    run("history", path, "--keep-versions", 9)
    run("rename", path, "ant", "emmet")
    run("forget", path, "--task", "summer")
    (version,) = history.versions(path)
    assert model_file.read(version).memory.task_names == ["spring"] and "bee" in classes(version)


def test_a_class_that_vanishes_in_any_transaction_is_in_no_version(path):
    history.keep_versions(path, 5)
    with transaction(path) as change:
        model = change.read()
        rename(model.memory, "ant", "emmet")
        change.renamed = {"ant": "emmet"}
        change.put(model)
    with transaction(path) as change:
        model = change.read()
        forget(model.memory, "emmet")
        change.put(model)
    assert change.cleaned == 1 and all("ant" not in classes(version) for version in history.versions(path))


def test_versions_are_clean_before_the_model_is_written(path, monkeypatch):
    run("history", path, "--keep-versions", 5)
    run("rename", path, "ant", "emmet")
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError), transaction(path) as change:
        patch.setattr(model_file.Model, "write", fail)
        forget(change.read().memory, "bee")
        patch.setattr(history, "_clean", lambda place, *_: place.unlink() or True)  # which writes, too
        change.put(change.read())
    assert path.read_bytes() == before and not history.versions(path)


def test_undo_takes_back_a_change_that_was_made(path, monkeypatch):
    """A version that was kept for a change that failed, or was killed, is none."""
    first = path.read_bytes()
    run("rename", path, "ant", "emmet")
    with monkeypatch.context() as patch, pytest.raises(OSError), transaction(path, keep=5) as change:
        patch.setattr(model_file.Model, "write", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        change.put(change.read())
    assert len(history.versions(path)) == 1
    history.keep_version(path, 5)  # and killed
    run("undo", path)
    assert path.read_bytes() == first and not history.versions(path)


@pytest.mark.skipif(sys.platform == "win32", reason="no folder can be synced")
@pytest.mark.parametrize("linked", [True, False])
def test_a_version_and_what_undo_put_back_survive_a_power_cut(path, monkeypatch, linked):
    """The copy is synced before it counts as a version, and the folder after the version has returned."""
    calls: list[str] = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *words: (calls.append(f"to {Path(words[1]).name}"), replace(*words))[1])
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: (calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file"), fsync(file))[1],
    )
    if not linked:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    history.keep_version(path, 1)
    assert calls == (["folder"] if linked else ["file", "to 000001.protosteer", "folder", "folder"])
    history.log(path, "rename", [], [], version="000001.protosteer")
    calls.clear()
    history.undo(path)
    assert calls == [f"to {path.name}", "folder"]


def test_the_log_is_as_private_as_the_model_and_survives_damage(path):
    path.chmod(0o600)
    run("rename", path, "ant", "emmet")
    log = history.beside(path)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    log.write_text(log.read_text() + '{"date": 1}\n{"keep_versions": "x"}\n[]\nnot JSON\n')
    entries, keep = history.read(path)
    assert len(entries) == 1 and keep == 0 and entries[0].classes == 4


@pytest.mark.parametrize("version", ["../x", "/etc/passwd", "1.txt", 5])
def test_a_version_is_a_file_of_its_folder(path, version):
    line = {"date": "", "command": "", "added": {}, "removed": {}, "renamed": {}, "classes": 1, "version": version}
    history.beside(path).write_text(json.dumps(line) + "\n")
    assert history.read(path)[0][0].version is None
