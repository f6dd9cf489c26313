"""Run folders: what they hold, what they refuse, how seeds are added and compared."""

import csv
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from expect import expect_error
from protosteer.errors import DataError, ProtosteerError, RunError, SettingsError
from protosteer.evaluation import manifest
from protosteer.evaluation.comparison import bins_of, gather
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.evaluation.metrics import over_seeds, summary
from protosteer.evaluation.run_folder import RunFolder, read_run
from protosteer.evaluation.seed_folder import SeedFolder
from protosteer.learner import Learner

pytestmark = pytest.mark.slow

CHEAP = {
    "stream": "split-digits", "method": "ncm", "tasks": 3, "train_per_class": 5, "test_per_class": 4, "device": "cpu",
}  # fmt: skip
TRAINED = {**CHEAP, "method": "cpp", "epochs": 1, "batch_size": 20, "neck_hidden": 16, "augmentation": "none"}


def run(
    out: Path, resume: bool = False, overwrite: bool = False, messages: list[str] | None = None, **values: Any
) -> Any:
    callbacks = [] if messages is None else messages
    experiment = Experiment.from_values({**CHEAP, **values, "out": out})
    return run_experiment(experiment, resume, overwrite, on_message=callbacks.append)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "cpp"
    experiment = Experiment.from_values({**TRAINED, "seeds": "0,1", "out": out})
    run_experiment(experiment, command=["protosteer", "run", "split-digits"])
    return out


def test_a_folder_holds_everything(finished):
    names = set(contents(finished))
    models = {f"seed-{s}/task-{t:02}.protosteer" for s in (0, 1) for t in (1, 2, 3)}
    results = ("matrix.csv", "metrics.json", "classes.json", *(f"predictions-{t:02}.npz" for t in (1, 2, 3)))
    seeds = {f"seed-{s}/{name}" for s in (0, 1) for name in results}
    assert names == models | seeds | {"manifest.json", "metrics.json", "log.txt", ".protosteer.lock"}
    learner = Learner.load(finished / "seed-1" / "task-02.protosteer")
    assert learner.classes == [str(digit) for digit in range(7)] and learner.settings.seed == 1


def test_the_manifest_tells_where_the_figures_come_from(finished):
    known = json.loads((finished / "manifest.json").read_text())
    told, session = known["configuration"], known["sessions"][0]
    assert told["method"] == "cpp" and told["settings"]["epochs"] == 1 and "seed" not in told["settings"]
    assert len(told["backbone"]["fingerprint"]) == 64 and told["stream"]["name"] == "split-digits"
    assert told["stream"]["class_order"] == [str(digit) for digit in range(10)]
    assert [task["train_images"] for task in told["stream"]["tasks"]] == [20, 15, 15]
    assert told["stream"]["checksums"] and known["seeds"] == [0, 1]
    assert session["command"] == ["protosteer", "run", "split-digits"]
    assert {"torch", "numpy", "kornia"} <= session["circumstances"]["versions"].keys()
    assert session["circumstances"]["threads"] >= 1 and session["circumstances"]["machine"]["processor"]
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    recorded = session["circumstances"]["commit"]
    assert recorded["hash"] == done.stdout.strip() if done.returncode == 0 else recorded is None


def test_the_commit_is_that_of_the_package_and_never_of_a_checkout_around_it(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    def found() -> Any:
        manifest.commit.cache_clear()
        return manifest.commit()

    package = tmp_path / "src" / "protosteer" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.setattr(manifest.protosteer, "__file__", str(package))
    try:
        assert found() is None, "no checkout"
        git("init")
        assert found() is None, "installed into somebody's checkout, not part of it"
        git("add", ".")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
        (tmp_path / "notes.txt").touch()  # no code
        assert found()["clean"] is True and len(found()["hash"]) == 40
        (package.parent / "new.py").touch()
        assert found()["clean"] is False
    finally:
        manifest.commit.cache_clear()


def test_figures_are_the_same_in_every_file(finished):
    figures = json.loads((finished / "metrics.json").read_text())
    seeds = [json.loads((finished / f"seed-{s}" / "metrics.json").read_text()) for s in (0, 1)]
    assert figures["seeds"] == seeds and (figures["mean"], figures["std"]) == over_seeds(seeds)
    with (finished / "seed-0" / "matrix.csv").open() as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["after_task", "task_1", "task_2", "task_3"] and lines[1][2:] == ["", ""]
    assert [[float(v) for v in line[1:] if v] for line in lines[1:]] == seeds[0]["matrix"]
    expected = summary(seeds[0]["matrix"], [16, 12, 12])
    assert {name: seeds[0][name] for name in expected} == expected
    last = seeds[0]["after_each_task"][-1]
    assert last["accuracy_over_tasks"] == seeds[0]["last_accuracy"]
    assert last["accuracy_over_images"] == seeds[0]["last_image_accuracy"]
    assert seeds[0]["diagnosis"]["mean"]["accuracy"] == pytest.approx(seeds[0]["last_accuracy"], abs=1e-4)


def test_a_seed_gives_the_same_figures_alone_and_in_company(finished, tmp_path):
    run(tmp_path / "alone", **{**TRAINED, "seeds": 1})
    for name in ("task-03.protosteer", "matrix.csv"):
        assert (tmp_path / "alone/seed-1" / name).read_bytes() == (finished / "seed-1" / name).read_bytes()


def test_a_finished_run_is_not_overwritten(tmp_path):
    run(tmp_path / "r")
    before = contents(tmp_path / "r")
    with expect_error("run-exists", RunError, finished=True):
        run(tmp_path / "r")
    assert contents(tmp_path / "r") == before
    resumed = run(tmp_path / "r", resume=True)
    assert resumed["seeds"][0] == json.loads(before["seed-0/metrics.json"])
    assert contents(tmp_path / "r")["seed-0/metrics.json"] == before["seed-0/metrics.json"]


def test_another_configuration_is_refused_with_the_differences(tmp_path):
    run(tmp_path / "r")
    before = contents(tmp_path / "r")
    with expect_error("other-configuration", RunError) as caught:
        run(tmp_path / "r", resume=True, centroids=2, test_per_class=3)
    wanted = {"settings.centroids: 1 -> 2", "stream.options.test_per_class: 4 -> 3"}
    assert wanted <= set(caught.value.details["changed"]) and contents(tmp_path / "r") == before


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    run(tmp_path / "r", seeds="0,1")
    (tmp_path / "r" / "notes.txt").write_text("mine")
    messages: list[str] = []
    run(tmp_path / "r", overwrite=True, centroids=2, messages=messages)
    assert not (tmp_path / "r/seed-1").exists() and (tmp_path / "r/notes.txt").read_text() == "mine"
    assert len(messages) == 1 and str(tmp_path / "r") in messages[0]
    with expect_error("resume-and-overwrite", SettingsError):
        run(tmp_path / "r", resume=True, overwrite=True, centroids=2)
    assert (tmp_path / "r/seed-0/metrics.json").is_file()


def test_other_circumstances_are_told(tmp_path):
    run(tmp_path / "r")
    path = tmp_path / "r/manifest.json"
    known = json.loads(path.read_text())
    known["sessions"][-1]["circumstances"]["threads"] = 99
    path.write_text(json.dumps(known))
    messages: list[str] = []
    run(tmp_path / "r", resume=True, seeds="1", messages=messages)
    assert len(messages) == 1 and "threads: 99 -> " in messages[0] and "last bits" in messages[0]


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    for name in ("photo.jpg", ".lock", ".notes.tmp", ".metrics.json.x.tmp"):
        (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with expect_error("foreign-files", RunError, files=sorted(before)):
        run(tmp_path)
    with expect_error("not-a-folder", RunError):
        run(tmp_path / "photo.jpg")
    with expect_error("cannot-write", ProtosteerError):
        run(tmp_path / "photo.jpg" / "x")
    assert contents(tmp_path) == before


def test_seeds_are_added_by_resuming_and_those_of_the_folder_are_the_default(tmp_path):
    messages: list[str] = []
    run(tmp_path / "r", resume=True, seeds="2", messages=messages)
    assert len(messages) == 1 and str(tmp_path / "r") in messages[0]
    first = (tmp_path / "r/seed-2/metrics.json").read_bytes()
    for seeds in ("1", None):
        figures = run(tmp_path / "r", resume=True, **({"seeds": seeds} if seeds else {}))
        assert [seed["seed"] for seed in figures["seeds"]] == [2, 1]
    assert (tmp_path / "r/seed-2/metrics.json").read_bytes() == first
    for seed in (1, 2):
        shutil.rmtree(tmp_path / f"r/seed-{seed}")
    assert [s["seed"] for s in run(tmp_path / "r", resume=True, seeds="1")["seeds"]] == [1]


@pytest.mark.parametrize("text", ['{"format": 99}', '{"format": 1}', "[]", "{", "\udcff"])
def test_a_damaged_manifest_is_named(tmp_path, text):
    run(tmp_path / "r")
    (tmp_path / "r/manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for action in (lambda: run(tmp_path / "r", resume=True), lambda: read_run(tmp_path / "r")):
        with pytest.raises(RunError) as error:
            action()
        assert error.value.code in ("bad-manifest", "unreadable-run")
        assert error.value.details["path"] == tmp_path / "r/manifest.json"


def test_metrics_that_reports_need_are_there_and_numbers(tmp_path):
    run(tmp_path / "r")
    path = tmp_path / "r/seed-0/metrics.json"
    figures = json.loads(path.read_bytes())
    moment = figures["after_each_task"][0]
    for changed in (
        {"last_forgetting": None},
        {"last_accuracy": "high"},
        {"after_each_task": [5]},
        {"after_each_task": [moment | {"bytes": "few"}]},
        {"after_each_task": [moment | {"losses": [[None]]}]},
    ):
        path.write_text(json.dumps(figures | changed))
        with expect_error("unreadable-run", RunError, path=path):
            read_run(tmp_path / "r")


@pytest.mark.parametrize("seeds", [["/../../precious"], [-1], [True], "0", [[0]], [0.0]])
def test_a_manifest_names_seeds_and_nothing_else(tmp_path, seeds):
    """`overwrite` removes the folders of its seeds."""
    run(tmp_path / "r")
    (tmp_path / "precious").mkdir()
    (tmp_path / "r" / "seed-").mkdir()
    path = tmp_path / "r/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "seeds": seeds}))
    for how in ({"resume": True}, {"overwrite": True}):
        with expect_error("bad-manifest", RunError, path=path):
            run(tmp_path / "r", **how)
    assert (tmp_path / "precious").is_dir()


ROW = {
    "accuracy": [1.0], "prompts_per_image": None, "retrieval_accuracy": 50.0, "train_seconds": 1.0, "eval_seconds": 1.0,
    "forward_passes": 4, "naive_forward_passes": 4, "bytes": 10, "trained_parameters": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("rows.json", json.dumps([ROW | changed]))
            for changed in (
                {"accuracy": [1.0, 2.0]},
                {"accuracy": "1"},
                {"bytes": None},
                {"seen_images": None},
                {"seen_images": 0},
                {"paper_bytes": {"seed": "x"}},
                {"reliability": [1]},
            )
        ),
        ("rows.json", json.dumps([{name: value for name, value in ROW.items() if value is not None}])),
        ("rows.json", "[5]"),
        ("rows.json", "{}"),
        ("rows.json", "[" * 100_000),
        ("learned-001.json", '"many"'),
        ("learned-001.json", "null"),
        ("learned-001.json", '{"train_seconds": "many"}'),
        ("learned-001.json", '{"train_seconds": 1.0, "losses": [5]}'),
        ("embeddings-001.safetensors", "no tensors"),
    ],
)
def test_an_unfinished_run_of_others_is_resumed_or_told_to_be_altered(tmp_path, name, content):
    folder = SeedFolder(tmp_path, ".safetensors")
    folder.save_learned(0, b"state", training := {"train_seconds": 1.0, "losses": [[0.5, 0.25]]})
    folder.save_embeddings(0, {"a": torch.ones(2)})
    folder.save_rows([ROW])
    assert folder.rows() and folder.embeddings() and folder.learned(0) == (b"state", training)
    (tmp_path / "unfinished" / name).write_text(content)
    with expect_error("unreadable-run", RunError, path=tmp_path / "unfinished" / name):
        (folder.rows(), folder.embeddings(), folder.learned(0))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name, blue in (("ant", 200), ("bee", 10)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (8, 8), (40 * i, 90, blue)).save(tmp_path / "photos" / name / f"{i}.bmp")
    return tmp_path / "photos"


def test_changed_images_are_another_configuration(tmp_path, photos):
    told = {"stream": f"folder:{photos}", "tasks": 2}
    run(tmp_path / "r", **told)
    run(tmp_path / "r", resume=True, seeds="1", **{**told, "stream": f"folder:{photos}/"})  # the same, as typed
    (photos / "ant/0.bmp").write_bytes((photos / "ant/4.bmp").read_bytes())  # of the same size
    with expect_error("other-configuration", RunError) as caught:
        run(tmp_path / "r", resume=True, **told)
    assert all(line.startswith("stream.checksums") for line in caught.value.details["changed"])


def test_images_that_were_skipped_are_named_in_the_log(tmp_path, photos):
    (photos / "bee/bad.jpg").write_text("not an image")
    told = {"stream": f"folder:{photos}", "tasks": 2}
    with expect_error("unreadable-image", DataError, path=photos / "bee/bad.jpg"):
        run(tmp_path / "a", **told)
    assert not (tmp_path / "a").exists(), "it is found before anything is learned"
    run(tmp_path / "b", **told, skip_unreadable=True)
    assert "bad.jpg cannot be read as an image; skipped" in (tmp_path / "b/log.txt").read_text()


def test_two_processes_do_not_share_a_folder(tmp_path):
    with (
        RunFolder(tmp_path / "r").locked(),
        expect_error("run-in-use", RunError, path=tmp_path / "r"),
        RunFolder(tmp_path / "r").locked(),
    ):
        pass


def test_what_a_killed_process_left_is_removed(tmp_path):
    run(tmp_path / "r")
    (tmp_path / "r/seed-0/.task-01.protosteer.abc.tmp").write_text("half")
    (tmp_path / "r/.metrics.json.abc.tmp").write_text("half")
    (tmp_path / "r/seed-0/unfinished").mkdir()
    run(tmp_path / "r", resume=True)
    assert not list((tmp_path / "r").rglob("*.tmp")) and not (tmp_path / "r/seed-0/unfinished").exists()


def test_values_go_to_run_stream_and_method():
    made = Experiment.from_values({**TRAINED, "seeds": [3, 1], "backbone": "nano", "base": None})
    assert made.seeds == (3, 1) and made.options.tasks == 3 and made.settings_for(3).seed == 3
    assert made.settings_for(1).to_dict()["epochs"] == 1 and made.folder == Path("runs/split-digits-cpp-nano")
    assert Experiment.from_values({"stream": "folder:some/shop/"}).folder == Path("runs/folder-shop-protosteer-nano")
    assert Experiment.from_values(CHEAP).seeds is None
    assert Experiment.from_values({**CHEAP, "seeds": "0, 2"}).seeds == (0, 2)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"stream": None}, "no-stream"),
        ({"epoch": 3}, "unknown-setting"),
        ({"bakbone": "nano"}, "unknown-setting"),
        ({"method": "l2q"}, "unknown-method"),
        ({"seed": 3}, "seed-not-seeds"),
        *(({"seeds": seeds}, "bad-seeds") for seeds in ("0,x", "1,1", [True])),
        ({"epochs": "many"}, "wrong-setting-type"),
        ({"tasks": 0}, "bad-option"),
        ({"threads": 0}, "setting-out-of-bounds"),
        *(
            ({name: value}, "wrong-setting-type")
            for name, value in {
                "image_size": "big", "stream": 5, "weights": 3, "class_order": ["1"], "crop": "a", "skip_unreadable": "no",
            }.items()
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(values, code):
    merged = {**{k: v for k, v in TRAINED.items() if k not in values}, **values}
    with expect_error(code, ProtosteerError) as caught:
        Experiment.from_values({k: v for k, v in merged.items() if v is not None})
    assert caught.value.details.get("name", "") in ("", *values, *values.values())


def test_an_unknown_stream_or_device_is_named(tmp_path):
    with expect_error("unknown-stream", DataError, name="split-digit"):
        run(tmp_path / "r", stream="split-digit")
    with expect_error("no-such-device", SettingsError):
        run(tmp_path / "r", device="gpu")
    assert not (tmp_path / "r").exists()


def test_a_run_of_an_older_version_is_the_same_run_unless_a_retired_setting_was_used(tmp_path):
    run(tmp_path / "r")
    file = tmp_path / "r" / "manifest.json"
    written = json.loads(file.read_text())
    written["configuration"]["settings"]["cached_views"] = 0
    file.write_text(json.dumps(written))
    run(tmp_path / "r", resume=True, seeds="0,1")
    run(tmp_path / "s", seeds="2")
    assert [len(seeds) for seeds in gather([str(tmp_path / "r"), str(tmp_path / "s")]).values()] == [3]
    written["configuration"]["settings"]["cached_views"] = 4
    file.write_text(json.dumps(written))
    assert list(gather([str(tmp_path / "r"), str(tmp_path / "s")])) == ["ncm, cached_views 4", "ncm"]
    with expect_error("other-configuration", RunError, changed=["settings.cached_views: 4 -> None"]):
        run(tmp_path / "r", resume=True)


def test_a_run_of_an_older_version_is_compared_and_goes_on_without_figures_that_it_lacks(tmp_path):
    run(tmp_path / "r", **TRAINED)
    for name in ("manifest.json", "seed-0/metrics.json"):
        file = tmp_path / "r" / name
        written = json.loads(file.read_text())
        later = [written["configuration"]["settings"]] if "configuration" in written else [written]
        for table in later:
            for new in ("rule", "prompt_tasks", "passes_per_image", "calibration_error", "reliability"):
                table.pop(new, None)
        file.write_text(json.dumps(written))
    messages: list[str] = []
    figures = run(tmp_path / "r", resume=True, seeds="0,1", messages=messages, **TRAINED)
    assert messages == [] and [seed["seed"] for seed in figures["seeds"]] == [0, 1]
    assert "calibration_error" not in figures["mean"] and figures["seeds"][1]["calibration_error"] > 0
    rows = gather([str(tmp_path / "r")])
    assert [len(seeds) for seeds in rows.values()] == [2]
    with expect_error("no-confidence", RunError):
        bins_of(rows)
    run(tmp_path / "s", **{**TRAINED, "seeds": "2"})
    rows = gather([str(tmp_path / "r"), f"new={tmp_path / 's'}"])
    assert list(bins_of(rows)) == ["new"]


def test_differences_of_two_trees():
    old = {"a": 1, "b": {"c": [1, 2], "d": 5}, "gone": True}
    new = {"a": 1, "b": {"c": [1, 3], "d": 5}, "new": "x" * 100}
    found = manifest.differences(old, new)
    assert found[:2] == ["b.c[1]: 2 -> 3", "gone: True -> None"]
    assert found[2].startswith("new: None -> xxx") and len(found[2]) < 80 and len(found) == 3
    assert manifest.differences(new, new) == []


def test_seeds_of_one_configuration_are_one_row(tmp_path):
    run(tmp_path / "a", seeds="0")
    run(tmp_path / "b", seeds="1,2")
    run(tmp_path / "c", seeds="0", centroids=2)
    rows = gather([str(tmp_path / name) for name in "bac"])
    assert {label: [s["seed"] for s in seeds] for label, seeds in rows.items()} == {
        "ncm": [0, 1, 2],
        "ncm, centroids 2": [0],
    }
    run(tmp_path / "d", **{**TRAINED, "test_per_class": 3})
    rows = gather([str(tmp_path / name) for name in "ad"])
    # Settings tell runs of one method apart, no others.
    assert list(rows) == ["ncm, test_per_class 4", "cpp, test_per_class 3"]
    rows = gather([f"base={tmp_path / 'a'}", f"more={tmp_path / 'c'}"])
    assert list(rows) == ["base", "more"]


def test_what_cannot_be_compared_is_refused(tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b")
    run(tmp_path / "c", centroids=2)
    with expect_error("repeated-seed", RunError, seed=0):
        gather([str(tmp_path / "a"), str(tmp_path / "b")])
    with expect_error("repeated-label", RunError, label="x"):
        gather([f"x={tmp_path / 'a'}", f"x={tmp_path / 'c'}"])
    with expect_error("not-a-run", RunError, path=tmp_path / "a" / "seed-0"):
        gather([str(tmp_path / "a" / "seed-0")])
    (tmp_path / "a/seed-0/metrics.json").unlink()
    with expect_error("no-finished-seed", RunError):
        read_run(tmp_path / "a")
