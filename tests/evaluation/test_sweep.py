"""Several methods on one stream: settings go where they belong, and no method is another's concern."""

import pickle
import statistics
from pathlib import Path
from typing import Any

import pytest

from expect import expect_error
from protosteer.errors import RunError, SettingsError, TrainingError
from protosteer.evaluation.comparison import gather
from protosteer.evaluation.experiment import run_experiment
from protosteer.evaluation.sweep import names_several, plan_experiments, run_several
from protosteer.methods import METHODS
from protosteer.methods.ncm import NCM
from protosteer.report.compare import comparison_tables

SMALL = {"stream": "split-digits", "tasks": 2, "train_per_class": 3, "test_per_class": 2, "device": "cpu"}


def plan(method: str, **more: Any) -> Any:
    return plan_experiments({**SMALL, "method": method, **more})


def several(method: str, **more: Any) -> Any:
    return [experiment for row in plan(method, **more).values() for experiment in row]


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
    assert names_several({"method": "all"}) and names_several({"method": "ncm,cpp"})
    assert names_several({"sweep": ["a=1,2"]}) and names_several({"class_orders": "1,2"})
    assert not any(names_several({"method": method}) for method in ("ncm", None, 3))
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
    together = plan("ncm,ranpac,finetune", features=20, first_session="none", epochs=1, out=tmp_path / "together")
    outcome = run_several(together)
    assert list(outcome.figures) == ["ncm", "ranpac", "finetune"] and not outcome.failed
    alone = several("finetune,ncm", epochs=1, out=tmp_path / "alone")[0]
    figures = run_experiment(alone)
    assert figures["seeds"][0]["matrix"] == outcome.figures["finetune"]["seeds"][0]["matrix"]
    states = sorted(path.relative_to(alone.folder) for path in alone.folder.rglob("task-*"))
    assert len(states) == 2
    for state in states:
        assert (alone.folder / state).read_bytes() == (together["finetune"][0].folder / state).read_bytes()


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path, broken: None) -> None:
    messages: list[str] = []
    made = plan("ncm,broken,ranpac", features=20, first_session="none", out=tmp_path)
    outcome = run_several(made, on_message=messages.append)
    assert list(outcome.figures) == ["ncm", "ranpac"] and list(outcome.failed) == ["broken"]
    assert len(messages) == 4 and str(outcome.failed["broken"]) in messages[2]


def test_all_folders_are_looked_at_before_the_first_is_written_to(tmp_path: Path) -> None:
    made = plan("ncm,ranpac", features=20, first_session="none", out=tmp_path)
    run_experiment(made["ranpac"][0])
    with expect_error("run-exists", RunError, path=tmp_path / "ranpac", finished=True):
        run_several(made)
    with expect_error("other-configuration", RunError):
        run_several(plan("ncm,ranpac", features=30, first_session="none", out=tmp_path), resume=True)
    with expect_error("resume-and-overwrite", SettingsError):
        run_several(made, resume=True, overwrite=True)
    (tmp_path / "strange" / "ranpac").mkdir(parents=True)
    (tmp_path / "strange" / "ranpac" / "thesis.tex").touch()
    with expect_error("foreign-files", RunError, files=["thesis.tex"]):
        run_several(plan("ncm,ranpac", out=tmp_path / "strange"), overwrite=True)
    assert not (tmp_path / "ncm").exists() and not (tmp_path / "strange" / "ncm").exists()


def test_what_is_finished_is_kept(tmp_path: Path) -> None:
    made = plan("ncm,ranpac", features=20, first_session="none", out=tmp_path)
    first = run_experiment(made["ranpac"][0])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ranpac" / "seed-0").iterdir()}
    outcome = run_several(made, resume=True)
    assert list(outcome.figures) == ["ncm", "ranpac"] and outcome.figures["ranpac"] == first
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "ranpac" / "seed-0").iterdir()}
    assert list(run_several(made, overwrite=True).figures) == ["ncm", "ranpac"]


def test_class_orders_are_runs_of_one_row(tmp_path: Path) -> None:
    made = plan("ncm", class_orders="1993,1", seeds="0,1", out=tmp_path / "r")
    assert [one.folder.name for one in made["ncm"]] == ["order-1993", "order-1"]
    assert [one.options.class_order for one in made["ncm"]] == ["seed:1993", "seed:1"]
    figures = run_several(made).figures["ncm"]
    assert [(s["class_order"], s["seed"]) for s in figures["seeds"]] == [
        ("seed:1993", 0), ("seed:1993", 1), ("seed:1", 0), ("seed:1", 1),
    ]  # fmt: skip
    accuracies = [seed["last_accuracy"] for seed in figures["seeds"]]
    assert figures["mean"]["last_accuracy"] == statistics.fmean(accuracies)
    assert figures["std"]["last_accuracy"] == statistics.stdev(accuracies)
    run_several(plan("ncm", class_orders=[1993], out=tmp_path / "more", seeds="2"))
    rows = gather([str(tmp_path / "r"), str(tmp_path / "more")])
    assert [(run["class_order"], run["seed"]) for run in rows["ncm"]] == [
        ("seed:1", 0), ("seed:1", 1), ("seed:1993", 0), ("seed:1993", 1), ("seed:1993", 2),
    ]  # fmt: skip
    assert all((Path(run["folder"]) / "metrics.json").is_file() for run in rows["ncm"])
    title = str(comparison_tables({"ncm": figures["seeds"]})[0].title)
    assert "over 4 runs (2 class orders, 2 seeds)" in title
    with expect_error("repeated-seed", RunError, seed=0):
        gather([str(tmp_path / "r"), str(tmp_path / "r" / "order-1")])
    assert len({run["test_images"] for run in rows["ncm"]}) == 1
    run_several(plan("ncm", draw=1, test_per_class=3, out=tmp_path / "drawn"))
    (drawn,) = gather([str(tmp_path / "drawn")]).values()
    assert drawn[0]["test_images"] != rows["ncm"][0]["test_images"]
    apart = gather([f"a={tmp_path / 'r' / 'order-1'}", f"b={tmp_path / 'r' / 'order-1993'}"])
    assert list(apart) == ["a", "b"]


def test_a_sweep_is_a_grid_that_goes_to_the_methods_that_have_the_setting(tmp_path: Path) -> None:
    sweep = ["centroids=1,2", "tasks=2,3"]
    made = plan("ncm,ranpac", sweep=sweep, tasks=None, features=20, first_session="none", out=tmp_path)
    assert list(made) == [
        *(f"ncm, centroids {c}, tasks {t}" for c in (1, 2) for t in (2, 3)), "ranpac, tasks 2", "ranpac, tasks 3",
    ]  # fmt: skip
    (one,) = made["ncm, centroids 2, tasks 3"]
    assert one.folder == tmp_path / "ncm" / "centroids-2" / "tasks-3"
    assert one.settings["centroids"] == 2 and one.options.tasks == 3
    outcome = run_several(made)
    assert list(outcome.figures) == list(made) and not outcome.failed
    assert len(outcome.figures["ranpac, tasks 3"]["seeds"][0]["matrix"]) == 3
    (default,) = plan("ncm", sweep="centroids=1,2")["ncm, centroids 1"]
    assert default.folder == Path("runs/split-digits-ncm-nano/centroids-1")


def test_finished_runs_of_a_sweep_are_reused(tmp_path: Path) -> None:
    run_several(plan("ncm", sweep=["centroids=1,2"], out=tmp_path))
    done = tmp_path / "centroids-2" / "seed-0" / "metrics.json"
    before = done.stat().st_mtime_ns
    outcome = run_several(plan("ncm", sweep=["centroids=1,2,3"], out=tmp_path), resume=True)
    assert len(outcome.figures) == 3 and done.stat().st_mtime_ns == before
    assert list(gather([str(tmp_path)])) == ["ncm", "ncm, centroids 2", "ncm, centroids 3"]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"class_orders": "1,1"}, "bad-class-orders"),
        ({"class_orders": "1,,2"}, "bad-class-orders"),
        ({"class_orders": "1", "class_order": "natural"}, "conflicting-options"),
        ({"class_orders": "upwards"}, "bad-class-order"),
        ({"sweep": ["centroids"]}, "bad-sweep"),
        ({"sweep": ["centroids=1,1"]}, "bad-sweep"),
        ({"sweep": ["centroids=1", "centroids=2"]}, "bad-sweep"),
        ({"sweep": ["backbone=nano,mini"]}, "bad-sweep"),
        ({"sweep": ["centroid=1,2"]}, "unknown-setting"),
        ({"sweep": ["centroids=0,1"]}, "setting-out-of-bounds"),
        ({"sweep": ["centroids=1,2"], "centroids": 3}, "conflicting-options"),
        ({"sweep": ["tasks=2,5"]}, "conflicting-options"),
        ({"published": True}, "no-published-settings"),
    ],
)
def test_mistakes_in_a_plan_are_named(values: dict[str, Any], code: str) -> None:
    with expect_error(code):
        plan("ncm", **values)


def test_published_settings_go_to_those_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NCM, "published", {"split-digits": {"centroids": 3, "neighbours": 1}})
    made = plan("ncm,ranpac", published=True, neighbours=2)
    assert made["ranpac"][0].published is False
    chosen = made["ncm"][0].settings_for(0)
    assert (chosen.centroids, chosen.neighbours) == (3, 2), "what is given wins"


class Workers:
    """A remote engine in this process: everything that a worker gets goes through pickle."""

    is_remote = True

    def run(self, make: Any, jobs: Any, on_done: Any, on_wait: Any = lambda: None) -> None:
        work = pickle.loads(pickle.dumps(make))()
        self.jobs = [job.name for job in jobs]
        for job in jobs:
            on_done(job, work(*pickle.loads(pickle.dumps(job.arguments))))
            on_wait()


def test_a_remote_engine_gets_the_seeds_of_all_runs_at_once(tmp_path: Path, broken: None) -> None:
    values = {"class_orders": "1,2", "seeds": "0,1"}
    local, engine = run_several(plan("ncm", **values, out=tmp_path / "local")), Workers()
    remote = run_several(plan("ncm,broken", **values, out=tmp_path / "remote"), engine=engine)
    assert len(engine.jobs) == 8 and engine.jobs[0] == "order-1, seed 0"
    assert list(remote.figures) == ["ncm"] and isinstance(remote.failed["broken"], TrainingError)
    pairs = zip(local.figures["ncm"]["seeds"], remote.figures["ncm"]["seeds"], strict=True)
    assert all(one["matrix"] == two["matrix"] for one, two in pairs)
