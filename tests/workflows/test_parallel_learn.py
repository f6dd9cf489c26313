"""Folders learned in parallel: bit-identical to one after the other, and what was done is not done again."""

from pathlib import Path

import pytest

from expect import expect_error
from photo_toys import photos
from protosteer.backbones import Backbone
from protosteer.errors import DataError, LearnerError
from protosteer.learner import Learner
from protosteer.runtime.executor import LocalExecutor
from protosteer.settings import Settings
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import learn_folder
from protosteer.workflows.parallel_learn import TaskPlan, learn_in_parallel, plan_tasks

pytestmark = pytest.mark.slow

QUICK = {"epochs": 1, "batch_size": 8, "neck_hidden": 16, "augmentation": "none", "centroids": 2}
ALONE = Settings.preset("best", independent=True, **QUICK)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load("nano")  # as a worker would


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("photos")
    classes = {"spring": ["ant", "bee"], "summer": ["cat", "dog"], "more/spring": ["elk", "fox"]}
    return [photos(root / name, some, 6, seed=i) for i, (name, some) in enumerate(classes.items())]


def in_turn(learner: Learner, folders: list[Path]) -> Learner:
    for folder in folders:
        learn_folder(learner, scan_folder(folder, learner.memory), holdout=0.2)
    return learner


class Counting(LocalExecutor):
    """Counts jobs, and may fail at one."""

    def __init__(self, fail_at: int | None = None):
        self.done, self.fail_at = 0, fail_at

    def run(self, make, jobs, on_done, on_wait=lambda: None):
        def made():
            work = make()

            def counted(*arguments):
                if self.done == self.fail_at:
                    raise DataError("stopped", code="stopped")
                self.done += 1
                return work(*arguments)

            return counted

        super().run(made, jobs, on_done, on_wait)


def in_parallel(learner: Learner, folders: list[Path], model: Path, engine: LocalExecutor | None = None) -> Learner:
    plans, _ = plan_tasks(learner.memory, folders)
    records, kept = learn_in_parallel(engine or Counting(), learner, plans, model, 0.2, "cpu")
    for record in records:
        learner.memory.add(record)
    assert sorted(path for path in model.parent.iterdir() if path != model) == sorted(kept)
    for path in kept:
        path.unlink()
    return learner


@pytest.mark.parametrize("preset", ["best", "fast", "paper", "instant"])
def test_parallel_is_the_same_to_the_bit_as_in_turn(backbone, folders, tmp_path, preset):
    settings = Settings.preset(preset, independent=True, **QUICK)
    whole = in_turn(Learner(backbone, settings), folders)
    pieced = in_parallel(Learner(backbone, settings), folders, tmp_path / "m.protosteer")
    assert pieced.tasks == ["spring", "summer", "spring-2"]
    assert pieced.model.pack() == whole.model.pack()


def test_a_model_that_has_a_prompt_for_all_classes_is_extended_to_the_same_bits(backbone, folders, tmp_path):
    first = in_turn(Learner(backbone, ALONE.replace(independent=False)), folders[:1])
    assert first.memory.shared_prompt is not None
    first.settings = ALONE
    whole = in_turn(first.copy(), folders[1:])
    assert in_parallel(first.copy(), folders[1:], tmp_path / "m.protosteer").model.pack() == whole.model.pack()


def test_what_was_done_before_a_stop_is_kept(backbone, folders, tmp_path):
    model = tmp_path / "m.protosteer"
    with expect_error("stopped"):
        in_parallel(Learner(backbone, ALONE), folders, model, Counting(fail_at=2))
    parts = list(tmp_path.iterdir())
    assert len(parts) == 2
    parts[0].write_bytes(parts[0].read_bytes()[:-1])  # damaged: learned again
    engine = Counting()
    pieced = in_parallel(Learner(backbone, ALONE), folders, model, engine)
    assert engine.done == 2
    assert pieced.model.pack() == in_turn(Learner(backbone, ALONE), folders).model.pack()
    with pytest.raises(DataError):
        in_parallel(Learner(backbone, ALONE), folders, model, Counting(fail_at=2))
    engine = Counting()
    learn_in_parallel(
        engine, Learner(backbone, ALONE), plan_tasks(Learner(backbone).memory, folders)[0], model, 0.0, "cpu"
    )
    assert engine.done == 3  # for another share held out, nothing that is kept will do


def test_tasks_that_depend_on_one_another_are_refused(backbone, folders, tmp_path):
    with expect_error("dependent-tasks", LearnerError):
        in_parallel(Learner(backbone, ALONE.replace(independent=False)), folders, tmp_path / "m.protosteer")


def test_the_plan_is_that_of_one_folder_after_the_other(backbone, folders, tmp_path):
    memory = in_turn(Learner(backbone, Settings.preset("instant")), folders[:1]).memory
    plans, there = plan_tasks(memory, folders)
    assert there == folders[:1] and [x.name for x in plans] == ["summer", "spring-2"]
    again = photos(tmp_path / "autumn", ["dog", "gnu"], 2)
    assert plan_tasks(memory, [*folders, again])[0][-1] == TaskPlan(again, "autumn", ("dog", "gnu"))
    assert plan_tasks(memory, [*folders, again], skip_known=True)[0][-1] == TaskPlan(again, "autumn", ("gnu",))
