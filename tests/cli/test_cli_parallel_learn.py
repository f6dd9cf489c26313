"""Several commands and a service that change one model at the same time: nothing that was said to be written is lost."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from conftest import easy_task
from expect import expect_cli_error
from photo_toys import photos
from protosteer.cli import main
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.file import Model
from protosteer.model.history import beside
from protosteer.model.history import read as history_of
from protosteer.serve.limits import RequestError
from protosteer.serve.model_store import Store
from protosteer.workflows.task_writer import TaskWriter

pytestmark = pytest.mark.slow

INSTANT = ["--preset", "instant", "--threads", "1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("photos")
    groups = {"spring": ["ant", "bee"], "summer": ["cat", "dog"], "autumn": ["eel", "fox"]}
    return {name: photos(place / name, classes, per_class=4) for name, classes in groups.items()}


@pytest.fixture
def model(folders, tmp_path) -> Path:
    path = tmp_path / "shop.protosteer"
    assert main(["learn", str(path), str(folders["spring"]), *INSTANT]) == 0
    return path


@pytest.fixture
def side_by_side(monkeypatch) -> None:
    """Two writers, having read the file, wait for each other before they write; who is kept away by a lock is
    waited for in vain."""
    barrier, real = threading.Barrier(2), Model.write

    def write(self, path):
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(timeout=1)
        real(self, path)

    monkeypatch.setattr(Model, "write", write)


def together(*works) -> list[object]:
    found: list[object] = [None] * len(works)

    def run(i: int) -> None:
        try:
            found[i] = works[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def put(path: Path, folder: Path):
    """What `learn` does, without its handlers of signals, which belong to a main thread."""
    from protosteer.workflows.folder_scan import scan_folder
    from protosteer.workflows.learn_folder import learn_folder

    writer = TaskWriter(path, None, print)
    learner = Learner.load(path)
    taught = learn_folder(learner, scan_folder(folder, learner.memory), holdout=0.0)
    return lambda: writer.put(learner, taught)


def test_two_learnings_that_end_together_are_both_in_the_file(model, folders, side_by_side):
    together(put(model, folders["summer"]), put(model, folders["autumn"]))
    assert sorted(model_file.read(model).memory.task_names) == ["autumn", "spring", "summer"]
    assert {*model.parent.iterdir()} == {model, beside(model)} and len(history_of(model)[0]) == 3


def test_a_service_and_a_command_that_write_together_lose_nothing(model, folders, side_by_side):
    store = Store(Learner.load(model), model, writable=True)
    pixels, _ = easy_task(["gnu"], per_class=3)
    told = together(lambda: store.add("gnu", pixels, 0), put(model, folders["summer"]))
    memory = model_file.read(model).memory
    assert {"ant", "bee", "cat", "dog"} <= set(memory.classes)
    if isinstance(told[0], RequestError):  # it came second, and has said so
        assert "changed on disk" in str(told[0]) and "gnu" not in memory.classes
    else:
        assert "gnu" in memory.classes


def test_a_model_that_is_deleted_during_learning_is_written_again_and_that_is_said(model, folders, capsys):
    work = put(model, folders["summer"])
    model.unlink()
    work()
    assert f"{model} was deleted meanwhile" in capsys.readouterr().out
    assert model_file.read(model).memory.task_names == ["spring", "summer"]


def test_a_file_that_appears_while_models_are_merged_is_not_replaced(model, folders, tmp_path, monkeypatch):
    other, out = tmp_path / "other.protosteer", tmp_path / "both.protosteer"
    assert main(["learn", str(other), str(folders["summer"]), *INSTANT]) == 0
    real = model_file.merge

    def slow(*arguments, **more):
        out.write_bytes(b"someone else's")
        return real(*arguments, **more)

    monkeypatch.setattr(model_file, "merge", slow)
    expect_cli_error("file-exists", "merge", model, other, "-o", out, path=out)
    assert out.read_bytes() == b"someone else's"


@pytest.mark.parametrize("name", ["two\nlines", "", "\x1b[2J", "x" * 201])
def test_a_task_cannot_be_called_anything(model, folders, name):
    said = expect_cli_error("bad-name", "learn", model, folders["summer"], "--name", name, *INSTANT)
    assert said.count("\n") <= 2 and "\x1b" not in said
    assert model_file.read(model).memory.task_names == ["spring"]


def test_a_link_that_leads_back_to_itself_gets_one_line(folders, tmp_path):
    loop = tmp_path / "loop.protosteer"
    loop.symlink_to(loop.name)
    folder = str(folders["spring"])
    for words in (["learn", loop, folder], ["forget", loop, "ant"], ["inspect", loop]):
        expect_cli_error(None, *words)
    expect_cli_error("link-loop", "adapt", folder, "-o", loop)
    assert os.path.islink(loop)
