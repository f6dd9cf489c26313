"""Forgetting removes records; what it claims about what remains must be so, to the byte."""

from pathlib import Path

import pytest

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import ALONE, EVIDENCE, QUICK, file_bytes, photos, taught
from protosteer.errors import LearnerError
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.model.unlearning import SHARED, forget, forget_all


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    place = tmp_path_factory.mktemp("forgetting")
    seasons = {"spring": ["ant", "bee"], "summer": ["cat", "dog"], "autumn": ["eel", "fox"]}
    return [photos(place / name, classes) for name, classes in seasons.items()]


@pytest.fixture(scope="module")
def alone(folders) -> Learner:
    """Independent tasks; never changed by a test."""
    return taught(*folders, settings=ALONE)


@pytest.fixture(scope="module")
def chained(folders) -> Learner:
    """Each task trained against those before; never changed by a test."""
    return taught(*folders)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_forgetting_an_independent_task_gives_the_file_of_never_having_taught_it(alone, folders, place, tmp_path):
    learner = alone.copy()
    outcome = learner.forget(task=folders[place].name)
    rest = [folder for i, folder in enumerate(folders) if i != place]
    assert outcome.exact and outcome.guarantee.startswith("exact")
    assert outcome.classes == alone.memory.tasks[place].class_names
    assert file_bytes(learner, tmp_path) == file_bytes(taught(*rest, settings=ALONE), tmp_path)


def test_dependent_tasks_are_exact_from_the_end_only(chained, folders, tmp_path):
    learner = chained.copy()
    assert not learner.copy().forget(task="summer").exact
    assert learner.forget(task="autumn").exact and learner.forget(task="summer").exact
    assert file_bytes(learner, tmp_path) == file_bytes(taught(folders[0]), tmp_path)


def test_a_class_of_a_task_with_others_leaves_the_prompt_it_helped_to_train(alone):
    learner = alone.copy()
    outcome = learner.forget("cat")
    assert not outcome.exact and outcome.classes == ["cat"] and outcome.tasks == ["summer"]
    assert "the prompt of task 'summer' was trained with its images" in outcome.guarantee
    assert "later tasks" not in outcome.guarantee  # they are independent
    second = learner.forget("dog")  # the last of its task: the prompt goes, too
    assert second.exact and learner.tasks == ["spring", "autumn"]


def test_bytes_are_those_of_the_records_removed(alone):
    learner = alone.copy()
    before = sum(task.bytes for task in learner.memory.tasks)
    removed = learner.forget("cat").bytes + learner.forget(task="spring").bytes
    assert removed == before - sum(task.bytes for task in learner.memory.tasks) > 0


@pytest.fixture(scope="module")
def by_evidence(folders) -> Learner:
    """The first task's prompt serves all classes, and is the only one; never changed by a test."""
    return taught(*folders, settings=EVIDENCE.replace(prompt_tasks="first"))


def test_the_prompt_for_all_classes_is_an_influence_of_its_task(by_evidence):
    whole = by_evidence.copy().forget(task="spring")
    assert not whole.exact and SHARED in whole.guarantee and "in a new model" in whole.guarantee
    assert "later tasks" not in whole.guarantee  # they have no prompts of their own
    one = by_evidence.copy().forget("ant")
    assert not one.exact and SHARED in one.guarantee and "of task 'spring'" not in one.guarantee
    assert by_evidence.copy().forget(task="summer").exact and by_evidence.copy().forget("fox").exact


def test_a_task_goes_exactly_when_nothing_is_left_that_its_prompt_serves(by_evidence, folders):
    outcome = forget_all(by_evidence.copy().memory, by_evidence.classes)
    assert all(one.exact for one in outcome)
    alone = taught(folders[0], settings=EVIDENCE)
    assert SHARED in alone.copy().forget("ant").guarantee and alone.copy().forget(task="spring").exact


def test_a_class_of_a_few_images_is_seen_under_the_prompt_for_all_classes(by_evidence):
    learner = by_evidence.copy()
    learner.add_class("wasp", easy_task(["bee"], per_class=3, seed=5)[0])
    learner.forget(task="summer")
    learner.forget(task="autumn")
    assert SHARED in learner.copy().forget(task="spring").guarantee
    assert learner.forget("wasp").exact and learner.forget(task="spring").exact


def test_later_prompts_of_their_own_are_told_beside_it(folders):
    learner = taught(*folders[:2], settings=EVIDENCE, holdout=0.0)  # else a tie drops the prompt
    guarantee = learner.copy().forget(task="spring").guarantee
    assert SHARED in guarantee and "prompts of later tasks were trained against" in guarantee
    guarantee = learner.copy().forget("cat").guarantee
    assert "the prompt of task 'summer' was trained with its images" in guarantee and SHARED not in guarantee


def test_one_independent_task_among_dependent_ones():
    """What a task was trained with counts, not the settings of the day."""
    learner = Learner(tiny_backbone(), QUICK)
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    learner.settings = ALONE
    learner.learn(easy_task(["cat", "dog"]), name="summer")
    assert learner.copy().forget(task="spring").exact
    learner.settings = QUICK
    learner.learn(easy_task(["eel", "fox"]), name="autumn")
    assert not learner.copy().forget(task="spring").exact and not learner.copy().forget(task="summer").exact


@pytest.mark.parametrize(
    ("name", "task", "code"),
    [
        (None, None, "nothing-to-forget"),
        ("ant", "spring", "nothing-to-forget"),
        ("spring", None, "unknown-class"),
        (None, "ant", "unknown-task"),
        ("", None, "unknown-class"),
    ],
)
def test_what_does_not_exist_is_rejected_and_nothing_changes(alone, name, task, code):
    memory = Memory(alone.memory.tasks)
    with expect_error(code, LearnerError):
        forget(memory, name, task=task)
    assert memory.tasks == alone.memory.tasks


def test_several_classes_at_once_or_none(chained):
    memory = Memory(chained.memory.tasks)
    with expect_error("unknown-class", LearnerError, name="yak"):
        forget_all(memory, ["ant", "yak"])
    assert memory.tasks == chained.memory.tasks
    outcome = forget_all(memory, ["fox", "dog", "eel", "dog"])
    assert [(one.tasks, one.classes) for one in outcome] == [(["summer"], ["dog"]), (["autumn"], ["eel", "fox"])]
    assert memory.classes == ["ant", "bee", "cat"]
    # autumn goes first, so that no prompt is left that was trained after summer
    assert outcome[1].exact and "later tasks" not in outcome[0].guarantee


def test_an_original_and_its_copy_can_go_together(alone):
    learner = alone.copy()
    learner.add_class("wasp", easy_task(["bee"], per_class=3, seed=5)[0])
    outcome = forget_all(learner.memory, ["ant", "bee", "wasp"])
    assert all(one.exact for one in outcome) and learner.tasks == ["summer", "autumn"]
    forget_all(learner.memory, learner.classes)
    assert learner.memory.tasks == () and learner.classes == []
