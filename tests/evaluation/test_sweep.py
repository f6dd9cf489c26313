"""Several methods on one stream: settings go where they belong, and no method is another's concern."""

from pathlib import Path
from typing import Any

import pytest

from expect import expect_error
from protosteer.errors import RunError, SettingsError, TrainingError
from protosteer.evaluation.experiment import run_experiment
from protosteer.evaluation.sweep import experiments_of, names_several, run_several
from protosteer.methods import METHODS
from protosteer.methods.ncm import NCM

SMALL = {"stream": "split-digits", "tasks": 2, "train_per_class": 3, "test_per_class": 2, "device": "cpu"}


def several(method: str, **more: Any) -> Any:
    return experiments_of({**SMALL, "method": method, **more})


def settings(experiments: Any) -> dict[str, dict[str, Any]]:
    return {one.method: dict(one.settings) for one in experiments}


class Broken(NCM):
    name = "broken"

    def learn(self, task):
        raise TrainingError("the loss is no longer finite; lower the learning rate")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "broken", Broken)


def test_all_or_commas_make_several_and_one_name_does_not() -> None:
    assert names_several("all") and names_several("ncm,cpp") and not any(map(names_several, ("ncm", None, 3)))
    assert [one.method for one in several("all")] == list(METHODS)
    assert [one.method for one in several("ranpac, ncm,ranpac")] == ["ranpac", "ncm"]


def test_settings_go_to_those_that_have_them() -> None:
    made = settings(several("ncm,ranpac,cpp", centroids=3, features=20, epochs=2))
    assert made == {
        "ncm": {"centroids": 3},
        "ranpac": {"features": 20, "epochs": 2},
        "cpp": {"centroids": 3, "epochs": 2},
    }
    assert settings(several("ncm,ranpac", seeds="0,1")) == {"ncm": {}, "ranpac": {}}


def test_a_preset_goes_to_those_that_have_it() -> None:
    assert [one.preset for one in several("protosteer,ncm", preset="instant")] == ["instant", None]
    assert [one.preset for one in several("cpp,ncm", preset="paper")] == ["paper", "paper"]


def test_each_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "ncm++", NCM)
    monkeypatch.setattr(NCM, "name", "ncm++")
    assert [str(one.folder) for one in several("cpp,ncm++")] == [
        "runs/split-digits-cpp-nano",
        "runs/split-digits-ncm++-nano",
    ]
    assert [one.folder for one in several("cpp,ncm++", out=tmp_path)] == [tmp_path / "cpp", tmp_path / "ncm++"]


@pytest.mark.parametrize(
    ("method", "values", "code"),
    [
        ("ncm,cp", {}, "unknown-method"),
        ("ncm,", {}, "unknown-method"),
        ("ncm,cpp", {"epohcs": 3}, "unknown-setting"),
        ("ncm,slda", {"epochs": 3}, "unknown-setting"),
        ("ranpac,cpp", {"epochs": 0}, "setting-out-of-bounds"),
        ("ncm,ranpac", {"preset": "fast"}, "unknown-preset"),
        ("ncm,cpp", {"seed": 3}, "seed-not-seeds"),
    ],
)
def test_mistakes_are_found_before_anything_is_run(method: str, values: dict[str, Any], code: str) -> None:
    with expect_error(code, SettingsError):
        several(method, **values)


def test_each_ends_in_the_bits_that_it_ends_in_alone(tmp_path: Path) -> None:
    made = several("ncm,ranpac,finetune", features=20, epochs=1, out=tmp_path / "together")
    outcome = run_several(made)
    assert list(outcome.figures) == ["ncm", "ranpac", "finetune"] and not outcome.failed
    alone = several("finetune,ncm", epochs=1, out=tmp_path / "alone")[0]
    figures = run_experiment(alone)
    assert figures["seeds"][0]["matrix"] == outcome.figures["finetune"]["seeds"][0]["matrix"]
    states = sorted(path.relative_to(alone.folder) for path in alone.folder.rglob("task-*"))
    assert len(states) == 2
    for state in states:
        assert (alone.folder / state).read_bytes() == (made[2].folder / state).read_bytes()


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path, broken: None) -> None:
    messages: list[str] = []
    outcome = run_several(several("ncm,broken,ranpac", features=20, out=tmp_path), on_message=messages.append)
    assert list(outcome.figures) == ["ncm", "ranpac"] and list(outcome.failed) == ["broken"]
    assert len(messages) == 4 and str(outcome.failed["broken"]) in messages[2]


def test_all_folders_are_looked_at_before_the_first_is_written_to(tmp_path: Path) -> None:
    made = several("ncm,ranpac", features=20, out=tmp_path)
    run_experiment(made[1])
    with expect_error("run-exists", RunError, path=tmp_path / "ranpac", finished=True):
        run_several(made)
    with expect_error("other-configuration", RunError):
        run_several(several("ncm,ranpac", features=30, out=tmp_path), resume=True)
    with expect_error("resume-and-overwrite", SettingsError):
        run_several(made, resume=True, overwrite=True)
    (tmp_path / "strange" / "ranpac").mkdir(parents=True)
    (tmp_path / "strange" / "ranpac" / "thesis.tex").touch()
    with expect_error("foreign-files", RunError, files=["thesis.tex"]):
        run_several(several("ncm,ranpac", out=tmp_path / "strange"), overwrite=True)
    assert not (tmp_path / "ncm").exists() and not (tmp_path / "strange" / "ncm").exists()


def test_what_is_finished_is_kept(tmp_path: Path) -> None:
    made = several("ncm,ranpac", features=20, out=tmp_path)
    first = run_experiment(made[1])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ranpac" / "seed-0").iterdir()}
    outcome = run_several(made, resume=True)
    assert list(outcome.figures) == ["ncm", "ranpac"] and outcome.figures["ranpac"] == first
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "ranpac" / "seed-0").iterdir()}
    assert list(run_several(made, overwrite=True).figures) == ["ncm", "ranpac"]
