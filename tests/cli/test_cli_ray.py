"""Commands on Ray write what one process writes, also if workers and drivers die."""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.evaluation.killed_run import VALUES
from tests.evaluation.test_killed_runs import results

from expect import expect_error, run_cli
from photo_toys import digit_photos
from protosteer.cli import main
from protosteer.errors import DataError, ExecutorError, ProtosteerWarning
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.model.history import beside
from protosteer.runtime import ray_executor
from protosteer.runtime.executor import Job
from protosteer.runtime.ray_executor import RayExecutor
from protosteer.workflows.prediction_table import Predictions
from protosteer.workflows.sharded_predict import predictions_from_spec, write_shards

pytestmark = pytest.mark.slow


pytest.importorskip("pyarrow", reason="shards need pyarrow")
if importlib.util.find_spec("ray") is None:  # not imported here: the executor prepares the environment before
    pytest.skip("these need Ray", allow_module_level=True)
if "PROTOSTEER_RAY" not in os.environ:
    pytest.skip("these start Ray again and again, for minutes; make test-ray runs them", allow_module_level=True)

TRAINED = ["--independent", "--set", "epochs=1", "--set", "batch_size=16", "--set", "neck_hidden=16"]
CPU = ["--device", "cpu", "--threads", "1"]
RAY = ["--engine", "ray"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One for all tests here; the commands find that there is one."""
    ray = ray_executor.import_ray()

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for name, digits in {"spring": [0, 1], "summer": [2, 3], "autumn": [4, 5, 6]}.items():
        digit_photos(root / name, digits, 8)
    digit_photos(root / "new", [0, 2, 4, 9], 60, skip=20)
    (root / "new" / "zero" / "07.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def model(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "shop.protosteer"
    folders = [str(photos / name) for name in ("spring", "summer", "autumn")]
    assert main(["learn", str(path), *folders, *TRAINED, *CPU]) == 0
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    return [r for p in sorted(folder.iterdir()) for r in pyarrow.parquet.read_table(p).to_pylist()]


# The executor


def squares(place: Path):
    """Its worker dies the first time that 2 is to be squared, and always of 5; 8 gives a warning."""

    def work(number: int) -> tuple[int, int]:
        if number == 5 or (number == 2 and not place.exists()):
            if number == 2:
                place.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 8:
            warnings.warn("8 is large", ProtosteerWarning, stacklevel=1)
        if number == 9:
            raise DataError("9 is too large", code="too-large", number=9)
        return number * number, __import__("torch").get_num_threads()

    return work


def run(place: Path, numbers: list[int]) -> dict[str, Any]:
    done: dict[str, Any] = {}
    jobs = [Job(f"number {number}", (number,)) for number in numbers]
    RayExecutor().run(functools.partial(squares, place), jobs, lambda job, result: done.update({job.name: result}))
    return done


def test_a_job_whose_worker_dies_is_done_again(tmp_path):
    with pytest.warns(ProtosteerWarning, match="8 is large"):
        assert run(tmp_path / "died", [1, 2, 3, 8]) == {f"number {n}": (n * n, 1) for n in (1, 2, 3, 8)}
    assert (tmp_path / "died").exists()


def test_a_job_that_kills_its_workers_is_named_when_all_others_are_done(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_executor, "RETRIES", 1)
    with expect_error("workers-died", ExecutorError, jobs=["number 5 (WorkerCrashedError)"]):
        run(tmp_path / "died", [5, 1, 3])


def test_an_error_of_a_job_keeps_its_code(tmp_path):
    with expect_error("too-large", ExecutorError, number=9, job="number 9"):
        run(tmp_path / "died", [9])


def test_workers_of_another_version_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_executor, "_versions", lambda: {"protosteer": "9.9", "torch": "9.9"})
    with expect_error("other-version", ExecutorError, job="number 1"):
        run(tmp_path / "died", [1])


# Predictions


def test_shards_are_those_of_one_process_and_rows_those_of_predict(model, photos, tmp_path, capsys):
    command = ["predict", str(model), str(photos / "new"), "--reject", "0.05", *CPU]
    shards = ["--shard", "32", "--out"]
    assert main([*command, *shards, str(tmp_path / "here")]) == 0
    assert "4 shards made" in run_cli(capsys, *command, *shards, tmp_path / "there", *RAY).err
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert main([*command, "--json"]) == 2  # one file cannot be read
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    made = rows(tmp_path / "there")
    assert [{k: v for k, v in row.items() if k != "error"} for row in made if not row["error"]] == printed
    assert [row["path"] for row in made if row["error"]] == [str(photos / "new/zero/07.png")]


class Dying:
    """Predicts, but kills its process once, when it has the rows of the second shard and has not written them."""

    def __init__(self, maker: Predictions, place: Path, at: str):
        self.maker, self.place, self.at = maker, place, at
        self.kind, self.width, self.chunk = maker.kind, maker.width, maker.chunk

    def rows(self, names):
        made = list(self.maker.rows(names))
        if self.at in names and not self.place.exists():
            self.place.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return made


def dying(spec, place: Path, at: str) -> Dying:
    return Dying(predictions_from_spec(spec, 3, None), place, at)


def test_a_worker_that_dies_loses_nothing_and_doubles_nothing(model, photos, tmp_path):
    from protosteer.learner import Learner
    from protosteer.workflows.learner_spec import LearnerSpec

    learner = Learner.load(model)
    maker = Predictions(learner)
    names = sorted(str(path) for path in (photos / "new").rglob("*.png"))
    make = functools.partial(dying, LearnerSpec.of(learner, "cpu"), tmp_path / "died", names[70])
    outcome = write_shards(RayExecutor(), maker, make, (), names, str(tmp_path / "out"), 32)
    assert (tmp_path / "died").exists()
    assert outcome.written == len(list((tmp_path / "out").iterdir())) == 4
    assert [row["path"] for row in rows(tmp_path / "out")] == names


def test_a_driver_that_dies_loses_nothing_and_doubles_nothing(model, photos, tmp_path):
    """In a process of its own, with a cluster of its own."""
    command = ["predict", str(model), str(photos / "new"), "--shard", "1", "--out", str(tmp_path / "out"), *CPU]
    driver = subprocess.Popen([sys.executable, "-m", "protosteer", *command, *RAY])
    while driver.poll() is None and not list(tmp_path.glob("out/part-*.parquet")):
        time.sleep(0.01)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    before = contents(tmp_path / "out")
    assert main(command) == 0
    after = contents(tmp_path / "out")
    assert len(before) > 0 and before.items() <= after.items()
    assert not [name for name in after if not name.startswith("part-")]
    assert [row["path"] for row in rows(tmp_path / "out")] == sorted(map(str, (photos / "new").rglob("*.png")))


# Folders and seeds


def test_folders_learned_at_once_are_the_same_model_to_the_bit(model, photos, tmp_path, capsys):
    path = tmp_path / "m.protosteer"
    folders = [str(photos / name) for name in ("spring", "summer", "autumn")]
    told = json.loads(run_cli(capsys, "learn", path, *folders, *TRAINED, *CPU, *RAY, "--json").out)
    assert [one["task"]["name"] for one in told] == ["spring", "summer", "autumn"]
    assert path.read_bytes() == model.read_bytes()
    assert {*tmp_path.iterdir()} == {path, beside(path)}
    assert run_cli(capsys, "learn", path, *folders, *TRAINED, *CPU, *RAY).err.count("is a task already") == 3
    assert path.read_bytes() == model.read_bytes()


def test_seeds_run_at_once_have_the_same_files_to_the_bit(tmp_path):
    values = {**VALUES, "epochs": 1, "tasks": 2}
    here = Experiment.from_values({**values, "out": tmp_path / "here"})
    there = Experiment.from_values({**values, "out": tmp_path / "there"})
    run_experiment(here)
    run_experiment(dataclasses.replace(there, seeds=(0,)))  # which is not run again
    began = (tmp_path / "there" / "seed-0" / "metrics.json").stat().st_mtime_ns
    run_experiment(there, resume=True, engine=RayExecutor(device="cpu"))
    assert (tmp_path / "there" / "seed-0" / "metrics.json").stat().st_mtime_ns == began
    whole = results(tmp_path / "here")
    assert {"seed-0/matrix.csv", "seed-1/task-02.protosteer", "metrics.json"} <= whole.keys()
    assert results(tmp_path / "there") == whole
