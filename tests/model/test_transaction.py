"""A change of a model file is whole or not there, and no one else's change is lost."""

import dataclasses
import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from conftest import easy_task, tiny_backbone
from expect import expect_error
from protosteer.errors import ModelFileError, ProtosteerWarning
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model import thumbnails
from protosteer.model.thumbnails import Thumb
from protosteer.model.transaction import transaction
from protosteer.model.unlearning import forget
from protosteer.settings import Settings

JPEG = b"\xff\xd8\xff" + b"0" * 50


@pytest.fixture
def path(tmp_path) -> Path:
    """A model of two classes, each of which has a thumbnail."""
    learner = Learner(tiny_backbone(), Settings.preset("paper", prompts=False, centroids=1))
    learner.learn(easy_task(["cat", "dog"], per_class=3), name="pets")
    (task,) = learner.memory.tasks
    digests = [torch.tensor([1]), torch.tensor([2])]
    learner.memory.replace(task, dataclasses.replace(task, classes=task.classes.with_rows("seen", digests)))
    learner.save(tmp_path / "pets.protosteer")
    thumbnails.write(tmp_path / "pets.protosteer", [Thumb("cat", 1, JPEG), Thumb("dog", 2, JPEG)])
    return tmp_path / "pets.protosteer"


def drop(path: Path, name: str) -> None:
    with transaction(path) as change:
        model = change.read()
        forget(model.memory, name)
        change.put(model)


def kept(path: Path) -> list[str]:
    return [thumb.name for thumb in thumbnails.read(path, model_file.read(path).memory)]


def test_a_change_is_written_with_its_side_files_after_one_read(path, monkeypatch):
    read, reads = model_file.read, []
    monkeypatch.setattr(model_file, "read", lambda *given: reads.append(given) or read(*given))
    path.with_name(f"{path.name}.index").write_bytes(b"digests of class names, by an earlier version")
    with transaction(path) as change:
        before = change.identity
        forget(change.read().memory, "cat")
        change.put(change.read())
    assert len(reads) == 1 and change.identity != before
    assert model_file.read(path).memory.classes == ["dog"] and kept(path) == ["dog"]
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.history", f"{path.name}.thumbs"]


def test_without_put_or_after_an_error_nothing_is_written(path):
    before = path.read_bytes()
    with transaction(path) as change:
        forget(change.read().memory, "cat")
    with pytest.raises(RuntimeError), transaction(path) as change:
        change.put(change.read())
        raise RuntimeError
    assert path.read_bytes() == before and kept(path) == ["cat", "dog"]


def test_a_file_need_not_be_there(path, tmp_path):
    new = tmp_path / "sub" / "new.protosteer"
    with transaction(new) as change:
        assert change.identity is None
        with expect_error("missing-model", ModelFileError, path=new):
            change.read()
        change.put(model_file.read(path))
    assert new.read_bytes() == path.read_bytes()


def test_what_is_not_valid_is_not_written(path):
    before = path.read_bytes()
    with expect_error("invalid-model", ModelFileError, path=path), transaction(path) as change:
        change.read().memory.table.columns["values.means"][0, 0] = torch.nan
        change.put(change.read())
    assert path.read_bytes() == before


def test_a_change_by_a_program_without_locks_is_not_overwritten(path):
    with expect_error("changed-meanwhile", ModelFileError, path=path), transaction(path) as change:
        change.put(change.read())
        path.write_bytes(b"another file")
    assert path.read_bytes() == b"another file"


def test_changes_wait_for_each_other(path):
    inside, names = threading.Event(), []

    def second() -> None:
        inside.wait()
        drop(path, "dog")
        names.append(model_file.read(path).memory.classes)

    thread = threading.Thread(target=second)
    thread.start()
    with transaction(path) as change:
        inside.set()
        thread.join(timeout=0.2)
        forget(change.read().memory, "cat")
        change.put(change.read())
    thread.join()
    assert names == [[]]


@pytest.mark.parametrize("removable", [True, False])
def test_a_side_file_that_cannot_be_written_is_removed_and_the_change_is_made(path, monkeypatch, removable):
    replace, unlink = os.replace, Path.unlink

    def full(source: str, target: Path) -> None:
        if str(target).endswith(".thumbs"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    def stuck(self: Path, missing_ok: bool = False) -> None:
        if not removable and self.name.endswith(".thumbs"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(self, missing_ok)

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "unlink", stuck)
    with pytest.warns(ProtosteerWarning, match=r"\.thumbs"):
        drop(path, "cat")
    assert model_file.read(path).memory.classes == ["dog"] and thumbnails.beside(path).exists() != removable
