"""Finished runs that are evaluated again without learning, and tuning on the first task."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from expect import expect_cli_error, expect_error
from protosteer.cli import main
from protosteer.errors import RunError, SettingsError
from protosteer.evaluation.comparison import gather
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.evaluation.experiment_context import open_context
from protosteer.evaluation.reevaluation import plan_reevaluation
from protosteer.evaluation.sweep import plan_experiments, run_several
from protosteer.evaluation.tuning import tune
from protosteer.methods.cpp import CPP
from protosteer.methods.ncm import NCM

pytestmark = pytest.mark.slow

VALUES = {
    "stream": "split-digits", "method": "cpp", "tasks": 3, "train_per_class": 5, "test_per_class": 4, "device": "cpu",
    "epochs": 1, "batch_size": 20, "neck_hidden": 16, "augmentation": "none", "centroids": 3,
}  # fmt: skip


def run(out: Path, **values: Any) -> Any:
    return run_experiment(Experiment.from_values({**VALUES, **values, "out": out}))


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(*_: Any) -> None:
        raise AssertionError("nothing is to be learned")

    monkeypatch.setattr(CPP, "learn", learn)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "r"
    run(out, seeds="0,1")
    return out


def test_a_run_is_evaluated_as_one_that_had_these_settings_from_the_start(finished, tmp_path, no_training):
    out = tmp_path / "e"
    plan = plan_reevaluation(finished, {"neighbours": 1, "device": "cpu", "out": out})
    figures = run_several(plan).figures["cpp"]
    assert [seed["seed"] for seed in figures["seeds"]] == [0, 1]
    old = json.loads((finished / "metrics.json").read_text())
    for one, two in zip(old["seeds"], figures["seeds"], strict=True):
        assert two["retrieval_accuracy"] <= one["retrieval_accuracy"] and two["passes_per_image"] == 2
        losses = [[row["losses"] for row in seed["after_each_task"]] for seed in (one, two)]
        assert losses[0] == losses[1] and two["train_seconds"] == one["train_seconds"]
    known = json.loads((out / "manifest.json").read_text())["configuration"]
    assert known["settings"]["neighbours"] == 1 and known["learned_with"] == {"neighbours": 3}
    assert list(gather([str(finished), str(out)])) == ["cpp", "cpp, neighbours 1 (learned with 3)"]


def test_the_figures_are_those_of_a_run_that_learned_with_the_settings(finished, tmp_path):
    run(tmp_path / "whole", neighbours=1)
    run_several(plan_reevaluation(finished, {"neighbours": 1, "device": "cpu", "out": tmp_path / "e"}))
    for name in ("matrix.csv", "predictions-03.npz", "classes.json"):
        assert (tmp_path / "whole/seed-0" / name).read_bytes() == (tmp_path / "e/seed-0" / name).read_bytes()


def test_class_orders_and_sweeps_are_evaluated_together(tmp_path):
    values = {**VALUES, "method": "ncm", "class_orders": "1,2", "out": tmp_path / "r"}
    for name in ("epochs", "batch_size", "neck_hidden", "augmentation"):
        del values[name]
    run_several(plan_experiments(values))
    assert main(["evaluate-run", str(tmp_path / "r"), "--sweep", "neighbours=1,5", "--device", "cpu"]) == 0
    rows = gather([str(tmp_path / "r-evaluated")])
    assert {label: len(runs) for label, runs in rows.items()} == {
        "ncm, neighbours 1 (learned with 3)": 2, "ncm, neighbours 5 (learned with 3)": 2,
    }  # fmt: skip
    one, five = rows.values()
    assert one[0]["retrieval_accuracy"] < five[0]["retrieval_accuracy"]


def test_runs_that_learned_with_other_settings_are_rows_of_their_own(tmp_path):
    values = {**VALUES, "method": "ncm,ranpac", "class_orders": "1,2", "features": 20, "first_session": "none"}
    for name in ("epochs", "batch_size", "neck_hidden", "augmentation", "centroids"):
        del values[name]
    run_several(plan_experiments({**values, "sweep": ["centroids=1,2"], "out": tmp_path / "r"}))
    again = plan_reevaluation(tmp_path / "r", {"neighbours": 1, "epochs": 2, "device": "cpu", "out": tmp_path / "e"})
    assert {label: len(row) for label, row in again.items()} == {"ncm": 2, "ncm, centroids 2": 2, "ranpac": 2}
    figures = run_several(again).figures
    assert figures["ncm"]["mean"]["last_accuracy"] != figures["ncm, centroids 2"]["mean"]["last_accuracy"]
    swept = plan_reevaluation(tmp_path / "r", {"sweep": ["neighbours=1,5"], "device": "cpu"})
    assert list(swept) == [f"ncm{c}, neighbours {n}" for c in ("", ", centroids 2") for n in (1, 5)], "ranpac has none"
    with expect_error("unknown-setting", SettingsError):
        plan_reevaluation(tmp_path / "r", {"neighbours": 1, "epohcs": 2})
    with expect_error("conflicting-options", SettingsError):
        plan_reevaluation(tmp_path / "r", {"sweep": ["neighbours=1,5"], "neighbours": 2})


def test_an_evaluation_says_what_was_learned_with_even_if_it_is_evaluated_again(finished, tmp_path):
    place = tmp_path / "all"
    shutil.copytree(finished, place / "r")
    run_several(plan_reevaluation(place / "r", {"neighbours": 1, "device": "cpu", "out": place / "one"}))
    run_several(plan_reevaluation(place / "one", {"neighbours": 2, "device": "cpu", "out": tmp_path / "two"}))
    assert list(gather([str(tmp_path / "two")])) == ["cpp"]
    known = json.loads((tmp_path / "two/manifest.json").read_text())["configuration"]
    assert known["learned_with"] == {"neighbours": 3}
    (row,) = plan_reevaluation(place, {"neighbours": 2, "device": "cpu"}).values()
    assert [one.states_from for one in row] == [place / "r"], "evaluations are no runs to be evaluated"


def test_an_evaluation_under_the_run_s_own_settings_is_the_same_run(finished, tmp_path):
    run_several(plan_reevaluation(finished, {"sweep": ["neighbours=1,3"], "device": "cpu", "out": tmp_path / "e"}))
    rows = gather([str(finished), str(tmp_path / "e")])
    assert {label: len(runs) for label, runs in rows.items()} == {"cpp": 2, "cpp, neighbours 1 (learned with 3)": 2}
    with expect_error("repeated-seed", RunError):
        gather([str(finished), str(finished)])


def test_the_split_of_a_run_comes_from_its_manifest_if_a_file_made_it(tmp_path, capsys):
    order = tmp_path / "order.txt"
    order.write_text("\n".join(str(digit) for digit in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)))
    run(tmp_path / "r", class_order=str(order))
    order.unlink()
    words = ["evaluate-run", str(tmp_path / "r"), "--set", "neighbours=1", "--device", "cpu", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["seeds"][0]["seed"] == 0
    known = json.loads((tmp_path / "r-neighbours-1/manifest.json").read_text())["configuration"]
    assert known["stream"]["class_order"][0] == "9"
    expect_cli_error("run-exists", *words)


def test_other_images_are_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "r")
    path = tmp_path / "r" / "manifest.json"
    known = json.loads(path.read_text())
    known["configuration"]["stream"]["checksums"] = {"digits": "md5:0"}
    path.write_text(json.dumps(known))
    with expect_error("other-configuration", RunError, path=tmp_path / "r"):
        run_several(plan_reevaluation(tmp_path / "r", {"device": "cpu"}))
    for name in ("folder:shop", "domains:shop", "greys"):
        known["configuration"]["stream"]["name"] = name
        path.write_text(json.dumps(known))
        with expect_error("no-stream", RunError):
            plan_reevaluation(tmp_path / "r", {})


@pytest.mark.parametrize("damage", ["method", "states"])
def test_a_run_of_others_runs_no_code_and_is_told_to_be_altered(finished, tmp_path, damage):
    shutil.copytree(finished, tmp_path / "r")
    if damage == "method":
        (tmp_path / "r/own.py").write_text("raise SystemExit")
        path = tmp_path / "r/manifest.json"
        known = json.loads(path.read_text())
        known["configuration"]["method"] = f"{tmp_path}/r/own.py:CPP"
        path.write_text(json.dumps(known))
        with expect_error("bad-manifest", RunError):
            plan_reevaluation(tmp_path / "r", {"device": "cpu"})
        return
    path = tmp_path / "r/seed-0/metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "after_each_task": [{}]}))
    plan = plan_reevaluation(tmp_path / "r", {"device": "cpu", "out": tmp_path / "e"})
    assert run_several(plan).failed["cpp"].code == "unreadable-run"


def test_tuning_sees_the_first_task_s_training_images_alone(monkeypatch):
    experiment = Experiment.from_values({"stream": "split-digits", "method": "ncm", "tasks": 5, "device": "cpu"})
    context = open_context(experiment)
    stream = context.stream(experiment.options)
    seen: list[tuple[str, ...]] = []
    learn = NCM.learn
    monkeypatch.setattr(NCM, "learn", lambda self, task: (seen.append(tuple(task.classes)), learn(self, task)))
    trials = tune(experiment, {"centroids": (2, 1, 8)}, context=context)
    assert set(seen) == {("0", "1")} and len(seen) == 3
    assert {trial.settings["centroids"] for trial in trials} == {1, 2, 8}
    assert [t.accuracy for t in trials] == sorted((t.accuracy for t in trials), reverse=True)
    # By hand: the validation images of the first task are held-out training images.
    options = dataclasses.replace(experiment.options, validation=0.2)
    first = context.stream(options)[0]
    assert len(first.test) == round(0.2 * len(stream[0].train)) == len(stream[0].train) - len(first.train)


def test_defaults_win_ties_and_a_method_without_grid_is_named(monkeypatch):
    monkeypatch.setattr(NCM, "grid", {})
    experiment = Experiment.from_values({"stream": "split-digits", "method": "ncm", "tasks": 10, "device": "cpu"})
    trials = tune(experiment, {"neighbours": (1, 2)})  # without effect on accuracy
    assert trials[0].settings == {"neighbours": 3} and len(trials) == 3
    with expect_error("no-grid", SettingsError, method="ncm"):
        tune(experiment)
    with expect_error("setting-out-of-bounds", SettingsError):
        tune(experiment, {"neighbours": (0,)})


def test_tune_prints_and_writes_the_best(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(NCM, "grid", {"centroids": (1, 2)})
    out = tmp_path / "best.toml"
    words = ["tune", "ncm", "split-digits", "--train-per-class", "20", "--device", "cpu", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == found["trials"][0]["settings"] and len(found["trials"]) == 2
    assert out.read_text() == f"centroids = {found['best']['centroids']}\n"
    assert main(words) == 0
    assert "--set centroids=" in capsys.readouterr().err
