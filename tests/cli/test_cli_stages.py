"""`protosteer learn` writes a model that can be used before it trains; whatever happens then, that one stays."""

import json
from pathlib import Path

import pytest

from expect import expect_cli_error
from photo_toys import photos
from protosteer.cli import main
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.history import beside
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress_bar import LearnProgress
from protosteer.settings import Settings
from protosteer.workflows import learn_folder

pytestmark = pytest.mark.slow

QUICK = ["--preset", "best"]  # which trains a prompt with every task
QUICK += ["--set", "epochs=3", "--set", "batch_size=8", "--set", "neck_hidden=16", "--set", "augmentation=none"]


@pytest.fixture(scope="module", autouse=True)
def always_train():
    """Also where the self-check finds no error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learn_folder, "MIN_ERRORS", -1.0)
        yield


@pytest.fixture(scope="module")
def spring(tmp_path_factory) -> Path:
    return photos(tmp_path_factory.mktemp("a") / "spring", ["ant", "bee"])


@pytest.fixture(scope="module")
def summer(tmp_path_factory) -> Path:
    return photos(tmp_path_factory.mktemp("b") / "summer", ["cat", "dog"])


@pytest.fixture(scope="module")
def whole(spring, summer, tmp_path_factory) -> Path:
    """Learned without an interruption."""
    path = tmp_path_factory.mktemp("whole") / "shop.protosteer"
    assert [learn(path, spring, *QUICK), learn(path, summer)] == [0, 0]
    return path


def learn(path: Path, folder: Path, *words: str) -> int:
    return main(["learn", str(path), str(folder), *words])


def during(monkeypatch, doing: str, work) -> None:
    """Something happens once, when learning is at that stage; of training, after the second step."""
    real, callbacks = LearnProgress.on_stage, []

    def on_stage(self, stage):
        real(self, stage)
        if stage.doing == doing:
            callbacks.append(stage)
            if len(callbacks) == (2 if stage.training else 1):
                work()

    monkeypatch.setattr(LearnProgress, "on_stage", on_stage)


def interrupt():
    raise KeyboardInterrupt


def interrupted(path: Path, folder: Path, *words: str, doing: str = "training", seconds: float = 0.0) -> None:
    """Ctrl-C; what has been trained so far is kept, or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFile.__init__, "__defaults__", (seconds,))
        during(patch, doing, interrupt)
        assert learn(path, folder, *words) == 130


# Ctrl-C


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["kept", "not kept"])
def test_ctrl_c_leaves_a_model_that_can_be_used_and_the_same_command_goes_on(
    spring, summer, whole, tmp_path, capsys, seconds
):
    path = tmp_path / "shop.protosteer"
    assert learn(path, spring, *QUICK) == 0
    capsys.readouterr()
    interrupted(path, summer, seconds=seconds)
    said = capsys.readouterr().err
    assert f"Usable now: {path}" in said and f"stopped; {path}" in said
    assert ("resumes training" in said) == (not seconds)
    left = Learner.load(path)
    record = left.memory.tasks[1]
    assert record.metadata.unfinished and record.prompt is None and record.metadata.held_out == 2
    assert set(left.predict(summer).labels) <= {"ant", "bee", "cat", "dog"}
    assert learn(path, summer) == 0
    assert "task summer is unfinished" in capsys.readouterr().err
    assert path.read_bytes() == whole.read_bytes() and {*tmp_path.iterdir()} == {path, beside(path)}


def test_the_training_goes_on_where_it_was(spring, tmp_path, monkeypatch):
    path, steps = tmp_path / "shop.protosteer", []
    interrupted(path, spring, *QUICK)
    real = LearnProgress.on_stage

    def on_stage(self, stage):
        steps.extend([stage.done] if stage.training else [])
        real(self, stage)

    monkeypatch.setattr(LearnProgress, "on_stage", on_stage)
    assert learn(path, spring) == 0 and steps[:2] == [2, 3]  # settings are the model's, which it has kept


def test_ctrl_c_before_anything_can_be_used_leaves_the_file_as_it_was(spring, summer, tmp_path, capsys):
    path = tmp_path / "shop.protosteer"
    interrupted(path, spring, *QUICK, doing="keys")
    assert "Usable now" not in capsys.readouterr().err and not path.exists()
    assert learn(path, spring, *QUICK, "--preset", "instant") == 0
    before = path.read_bytes()
    interrupted(path, summer, doing="keys")
    assert path.read_bytes() == before


def test_another_command_meanwhile_works_and_the_unfinished_task_stays(spring, summer, tmp_path, capsys):
    path = tmp_path / "shop.protosteer"
    interrupted(path, spring, *QUICK)
    assert learn(path, summer, "--preset", "instant") == 0
    assert "task spring is unfinished" in capsys.readouterr().err
    first, second = model_file.read(path).memory.tasks
    assert first.metadata.unfinished and second.name == "summer"
    assert learn(path, spring, "--preset", "best", *QUICK) == 0
    first, after = model_file.read(path).memory.tasks
    assert not first.metadata.unfinished and first.prompt is not None
    assert [dict(after.tensors()).keys(), after.metadata] == [dict(second.tensors()).keys(), second.metadata]


def test_other_classes_or_names_do_not_go_on_with_it(spring, tmp_path):
    path = tmp_path / "shop.protosteer"
    interrupted(path, spring, *QUICK)
    left = path.read_bytes()
    more = photos(tmp_path / "spring", ["ant", "bee", "cow"])
    assert learn(path, spring, "--name", "other") == 0 and path.read_bytes() == left
    assert learn(path, more, *QUICK) == 0
    tasks = model_file.read(path).memory.tasks
    assert [(task.name, task.class_names, bool(task.metadata.unfinished)) for task in tasks] == [
        ("spring", ["ant", "bee"], True),
        ("spring-2", ["cow"], False),
    ]


# Someone else changes the file meanwhile


def added(path: Path, folder: Path):
    """Someone else adds a class."""

    def work():
        other = Learner.load(path)
        other.add_class("wasp", folder / "ant")
        other.save(path)

    return work


@pytest.mark.parametrize("doing", ["keys", "training"])
def test_what_someone_else_adds_meanwhile_stays(spring, summer, whole, tmp_path, monkeypatch, capsys, doing):
    """Also if that was before the usable model was written, and so before what training began with."""
    path = tmp_path / "shop.protosteer"
    assert learn(path, spring, *QUICK) == 0
    during(monkeypatch, doing, added(path, spring))
    assert learn(path, summer) == 0
    assert "was changed by someone else meanwhile" in capsys.readouterr().err
    learner = Learner.load(path)
    names = ["spring", "wasp", "summer"] if doing == "keys" else ["spring", "summer", "wasp"]
    assert learner.tasks == names and not any(task.metadata.unfinished for task in learner.memory.tasks)
    learner.forget("wasp")
    learner.save(path)
    assert path.read_bytes() == whole.read_bytes()


def forgotten(path: Path, **what: str):
    def work():
        other = Learner.load(path)
        other.forget(**what)
        other.save(path)

    return work


def test_a_task_that_is_forgotten_while_it_is_trained_does_not_come_back(spring, summer, tmp_path, monkeypatch):
    path = tmp_path / "shop.protosteer"
    assert learn(path, spring, *QUICK) == 0
    during(monkeypatch, "training", forgotten(path, task="summer"))
    expect_cli_error("task-gone", "learn", path, summer, name="summer")
    assert model_file.read(path).memory.task_names == ["spring"]


def test_a_class_that_is_forgotten_while_its_task_is_trained_does_not_come_back(summer, tmp_path, monkeypatch, capsys):
    path = tmp_path / "shop.protosteer"
    during(monkeypatch, "training", forgotten(path, name="dog"))
    assert learn(path, summer, *QUICK) == 0
    assert "warning: 'dog' was forgotten" in capsys.readouterr().err
    (task,) = model_file.read(path).memory.tasks
    assert task.class_names == ["cat"] and not task.metadata.unfinished


def test_influence_of_what_is_forgotten_meanwhile_is_told(spring, summer, tmp_path, monkeypatch, capsys):
    """The prompt for all classes was trained with it, though this task is trained by itself."""
    path = tmp_path / "shop.protosteer"
    assert learn(path, spring, *QUICK) == 0
    during(monkeypatch, "keys", forgotten(path, name="ant"))
    assert learn(path, summer, "--preset", "instant") == 0
    assert "warning: 'ant' was forgotten" in capsys.readouterr().err


# What is told


def test_the_self_check_tells_what_training_brought(spring, summer, tmp_path, capsys):
    path = tmp_path / "shop.protosteer"
    assert learn(path, spring, *QUICK) == 0
    assert "2 of 2 test images right with it, 2 without" in capsys.readouterr().out
    assert learn(path, summer, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["check_before_training"].keys() == figures["check"].keys()
    assert figures["task"]["trained"] is False and figures["training"] == "dropped"  # a tie: it costs a pass
    low, high = figures["self_check"]["interval"]
    assert low < figures["self_check"]["accuracy"] <= high
    more = photos(tmp_path / "more", ["yak", "zebu"])
    assert learn(path, more, "--preset", "instant", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["check_before_training"] is None and "Usable now" not in told.err


def test_a_new_model_is_of_its_preset_and_an_old_one_keeps_its_own(spring, summer, tmp_path, capsys):
    def settings(path: Path) -> Settings:
        return model_file.read(path).settings

    quick = {"epochs": 3, "batch_size": 8, "neck_hidden": 16, "augmentation": "none"}
    best, paper = tmp_path / "best.protosteer", tmp_path / "paper.protosteer"
    assert learn(best, spring, *QUICK) == learn(paper, spring, *QUICK, "--preset", "paper") == 0
    assert settings(best) == Settings.preset("best", **quick) and settings(paper) == Settings.preset("paper", **quick)
    assert learn(best, summer) == learn(paper, summer) == 0
    assert settings(best) == Settings.preset("best", **quick) and settings(paper) == Settings.preset("paper", **quick)
    assert "another rule" not in capsys.readouterr().err
    more = photos(tmp_path / "more", ["yak", "zebu"])
    assert learn(best, more, "--preset", "fast", "--independent") == 0
    assert settings(best) == Settings.preset("fast", **{**quick, "epochs": 15, "batch_size": 50}, independent=True)
    assert model_file.read(best).memory.tasks[-1].prompt is None
    assert "nothing was trained" in capsys.readouterr().err
    assert learn(paper, more, "--preset", "instant") == 0
    assert "another rule" in capsys.readouterr().err
    assert Learner.load(paper).reader.rule == "paper"


def test_an_interrupted_training_is_finished_without_training(spring, tmp_path, capsys):
    path = tmp_path / "shop.protosteer"
    interrupted(path, spring, *QUICK)
    assert learn(path, spring, "--preset", "instant") == 0
    (task,) = model_file.read(path).memory.tasks
    assert not task.metadata.unfinished and task.prompt is None and task.images == 16
    capsys.readouterr()
    assert main(["predict", str(path), str(spring / "ant")]) == 0 and "note: " not in capsys.readouterr().err
