"""How methods stand to one another on a stream of noisy images: what each is for must show, with slack.

Which relation is asked of a method follows from what it declares of itself, so that new ones are covered.
"""

from functools import cache

import pytest
import torch
from test_methods import one_maker  # shares what the checks have learned

from protosteer.methods import METHODS
from protosteer.methods.testing import GROUPS, toy_images

pytestmark = pytest.mark.slow

SLACK = 0.1
REHEARSING = [name for name, method in METHODS.items() if method.uses_rehearsal]
# Nothing is trained step by step, so that there is nothing to be overwritten.
UNTRAINED = [name for name, method in METHODS.items() if not hasattr(method.settings_class, "epochs")]
REMEMBERING = sorted({*REHEARSING, *UNTRAINED, "cpp", "protosteer"})
OTHERS = [name for name in METHODS if name not in {*REMEMBERING, "finetune"}]


@cache
def accuracies(name: str) -> list[float]:
    """Of each task, when the last one has been learned."""
    make = one_maker(name)
    method = make.after()
    found = []
    for group, answers in zip(GROUPS, make.answers(method), strict=True):
        labels = toy_images(group, per_class=5)[1]
        truth = torch.tensor([method.classes.index(label) for label in labels])
        found.append(float((answers == truth).float().mean()))
    return found


def accuracy(name: str) -> float:
    return sum(accuracies(name)) / len(GROUPS)


def test_fine_tuning_knows_its_last_task_alone():
    first, second, last = accuracies("finetune")
    assert last > 0.9 and first < 0.5 and second < 0.5


@pytest.mark.parametrize("name", [name for name in METHODS if name != "joint"])
def test_nothing_is_far_above_joint_training(name: str):
    assert accuracy(name) <= accuracy("joint") + SLACK


@pytest.mark.parametrize("name", REMEMBERING)
def test_rehearsal_and_what_is_not_trained_are_far_above_fine_tuning(name: str):
    assert accuracy(name) > accuracy("finetune") + 2 * SLACK


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_trained_without_old_images_is_not_below_fine_tuning(name: str):
    assert accuracy(name) >= accuracy("finetune") - SLACK
