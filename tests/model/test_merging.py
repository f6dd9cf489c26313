"""What several learners know, in one list: equal to having been taught all, and nothing clashes."""

from pathlib import Path

import pytest
import torch

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import ALONE, QUICK, file_bytes, photos, taught
from protosteer.data.transforms import Preprocessing
from protosteer.errors import LearnerError
from protosteer.learner import Learner, merge
from protosteer.model.index import Index
from protosteer.model.merging import concatenate

BASELINE = QUICK.replace(prompts=False)


def plain(**tasks: list[str]) -> Learner:
    """A learner without prompts: cheap to teach."""
    learner = Learner(tiny_backbone(), BASELINE)
    for name, classes in tasks.items():
        learner.learn(easy_task(classes, per_class=3), name=name)
    return learner


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    place = tmp_path_factory.mktemp("merging")
    return [photos(place / "spring", ["ant", "bee"]), photos(place / "summer", ["cat", "dog", "eel"])]


def test_independent_models_taught_apart_give_the_file_of_one_taught_both(folders, tmp_path):
    spring, summer = folders
    apart = [taught(spring, settings=ALONE), taught(summer, settings=ALONE)]
    both = taught(spring, summer, settings=ALONE)
    assert file_bytes(merge(*apart), tmp_path) == file_bytes(both, tmp_path)
    assert file_bytes(merge(*apart[::-1]), tmp_path) != file_bytes(both, tmp_path)  # the order of tasks is kept


def test_dependent_models_taught_apart_do_not(folders):
    spring, summer = folders
    merged = merge(taught(spring), taught(summer))
    both = taught(spring, summer)
    assert merged.classes == both.classes
    assert not torch.equal(merged.memory.tasks[1].prompt, both.memory.tasks[1].prompt)


def test_names_that_clash_are_refused_and_can_be_given_anew():
    a, b = plain(t=["ant", "bee"]), plain(t=["bee", "cat"])
    assert concatenate([a.memory]).tasks == a.memory.tasks  # one part alone stays as it is
    with expect_error("task-exists", LearnerError, name="t"):
        merge(a, b)
    assert merge(a, b, task_renames={"t": "u"}).classes == ["ant", "bee", "cat"]
    merged = merge(a, b, renames={"bee": "bumblebee"}, task_renames={"t": "u"})
    assert merged.classes == ["ant", "bee", "bumblebee", "cat"] and merged.tasks == ["t", "u"]
    renamed, own = merged.memory.tasks[1].classes[0], b.memory.tasks[0].classes[0]
    assert torch.equal(renamed.keys, own.keys) and torch.equal(renamed.values.means, own.values.means)
    assert b.classes == ["bee", "cat"] and a.classes == ["ant", "bee"]


def test_renames_apply_to_all_but_the_first_and_at_once():
    parts = [plain(t=["ant"]), plain(u=["ant", "bee"]), plain(v=["cow"])]
    assert merge(*parts[1:], renames={"cow": "calf"}).classes == ["ant", "bee", "calf"]
    merged = merge(*parts, renames={"ant": "bee", "bee": "wasp"})  # not ant -> bee -> wasp
    assert merged.classes == ["ant", "bee", "wasp", "cow"]


@pytest.mark.parametrize(
    ("renames", "task_renames", "code", "name"),
    [
        ({"yak": "gnu"}, None, "unknown-class", "yak"),
        ({"ant": "gnu"}, None, "unknown-class", "ant"),  # only the first has it
        (None, {"t": "s"}, "unknown-task", "t"),
        (None, {"u": "t"}, "task-exists", "t"),
    ],
)
def test_renames_that_lead_nowhere_are_rejected(renames, task_renames, code, name):
    with expect_error(code, LearnerError, name=name):
        merge(plain(t=["ant"]), plain(u=["cat"]), renames=renames, task_renames=task_renames)


def test_two_classes_of_a_task_cannot_get_one_name():
    with expect_error("class-exists", LearnerError, task="u", name="gnu"):
        merge(plain(t=["ant"]), plain(u=["cat", "dog"]), renames={"cat": "gnu", "dog": "gnu"})


def test_other_backbones_preprocessings_and_ways_to_predict_are_refused():
    a = plain(t=["ant"])
    other = Learner(tiny_backbone(seed=1), BASELINE)
    with expect_error("other-backbone", LearnerError):
        merge(a, other)
    other = Learner(tiny_backbone(), BASELINE)
    other.backbone.preprocessing = Preprocessing(16, (0.4, 0.4, 0.4), (0.5, 0.5, 0.5))
    with expect_error("other-preprocessing", LearnerError):
        merge(a, other)
    with expect_error("other-settings", LearnerError, name="temperature"):
        merge(a, Learner(tiny_backbone(), BASELINE.replace(temperature=0.5)))


def test_copies_of_a_prompt_stay_copies():
    a = Learner(tiny_backbone(), QUICK)
    a.learn(easy_task(["ant", "bee"]), name="t")
    a.add_class("wasp", easy_task(["bee"], per_class=3, seed=9)[0])
    merged = merge(plain(u=["cat"]), a)
    assert Index.build(merged.memory).prompt_owners.tolist() == [0, 1, 1]
    assert merged.memory.tasks[2].few_shot and merged.classes == ["cat", "ant", "bee", "wasp"]
