"""What methods with prompts over a frozen backbone have in common."""

import pytest
import torch

from protosteer.methods import METHODS
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.prompt_base import Prompted
from protosteer.methods.testing import GROUPS
from protosteer.methods.training_utils import task_cross_entropy

pytestmark = pytest.mark.slow

NAMES = [name for name, method in METHODS.items() if issubclass(method, Prompted)]


def learned(name: str, tasks: int) -> Prompted:
    method = Maker(METHODS[name]).after(tasks)
    assert isinstance(method, Prompted)
    return method


def test_cross_entropy_is_over_the_new_classes():
    """By logarithms written out, with the scores of earlier classes as minus infinity."""
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = [2, 3, 4, 3]
    expected = 0.0
    for row, label in zip(scores.detach(), labels, strict=True):
        masked = torch.tensor([-torch.inf if k < 2 else row[k] for k in range(5)])
        expected += float(torch.log(torch.exp(masked).sum()) - row[label]) / 4
    loss = task_cross_entropy(scores, torch.tensor(labels), known_count=2)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert not scores.grad[:, :2].any() and scores.grad[:, 2:].all()


@pytest.mark.parametrize("name", NAMES)
def test_the_head_keeps_its_rows_unless_a_task_has_one_class(name):
    """A mask would leave a single class nothing to learn: it is separated from all those before it."""
    method = learned(name, 1)
    before = method.head.weight.detach().clone()
    learn_task(method, GROUPS[1])
    assert torch.equal(method.head.weight[:2], before)
    before = method.head.weight.detach().clone()
    learn_task(method, GROUPS[2])
    assert len(GROUPS[2]) == 1 and not torch.equal(method.head.weight[:5], before)


@pytest.mark.parametrize("name", NAMES)
def test_two_passes_per_image(name):
    make = Maker(METHODS[name])
    method = make.after()
    assert method.answer(make.images(method, GROUPS[1])).prompts.tolist() == [1] * 15
