"""CODA-Prompt's sums, its penalty and its orthonormal beginnings against loops written out."""

import math

import pytest
import torch
from torch import nn

from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.coda_prompt import CODAPrompt, draw_orthonormal
from protosteer.methods.testing import GROUPS, toy_images


def learning(**changes) -> CODAPrompt:
    """One that has learned a task and has components of a second one under way."""
    method = Maker(CODAPrompt, changes).after(1)
    assert isinstance(method, CODAPrompt)
    torch.manual_seed(0)
    method.current = {name: nn.Parameter(tensor) for name, tensor in method.new_task_parameters().items()}
    return method


def components(method: CODAPrompt, name: str, layer: int) -> list[torch.Tensor]:
    """Of both tasks, as plain tensors."""
    return [*method.past[name][0][layer].detach(), *method.current[name][layer].detach()]


def test_a_prompt_is_the_sum_of_components_weighted_by_attention():
    method = learning()
    pixels = toy_images(GROUPS[1], per_class=1)[0]
    queries = method.backbone.embed(method.backbone.preprocessing(pixels, method.backbone.device))
    prefix = method.prompt(queries)
    assert [tuple(layer.shape) for layer in prefix.layers] == [(3, 2, 4, 24)] * 2
    for layer, found in enumerate(prefix.layers):
        for query, both in zip(queries.tolist(), found, strict=True):
            expected = torch.zeros(8, 24)
            for prompt, key, attention in zip(
                *(components(method, name, layer) for name in ("prompts", "keys", "attention")), strict=True
            ):
                asked = [q * a for q, a in zip(query, attention.tolist(), strict=True)]
                dot = sum(x * k for x, k in zip(asked, key.tolist(), strict=True))
                lengths = math.sqrt(sum(x * x for x in asked)) * math.sqrt(sum(k * k for k in key.tolist()))
                expected += dot / lengths * prompt
            torch.testing.assert_close(both[0].detach(), expected[:4])  # keys
            torch.testing.assert_close(both[1].detach(), expected[4:])  # values


def test_the_penalty_is_the_distance_from_orthonormal_rows():
    method = learning(orthogonality=0.3)
    expected = 0.0
    for layer in range(2):
        for name in ("prompts", "keys", "attention"):
            rows = [row.flatten().tolist() for row in components(method, name, layer)]
            for i, a in enumerate(rows):
                for j, b in enumerate(rows):
                    dot = sum(x * y for x, y in zip(a, b, strict=True))
                    expected += (dot - (i == j)) ** 2 / len(rows) ** 2
    _, penalty = method.training_prompt(torch.ones(2, 24))
    assert expected > 1e-3 and penalty.item() == pytest.approx(0.3 * expected, rel=1e-4)


def test_new_components_are_orthonormal_and_orthogonal_to_those_before():
    """Also where earlier ones are not orthogonal any more, being trained."""
    method = learning()
    for name in ("prompts", "keys", "attention"):
        for layer in range(2):
            old, new = (t[layer].detach().flatten(1).double() for t in (method.past[name][0], method.current[name]))
            assert ((old @ old.T) - torch.eye(3)).abs().max() > 1e-3  # trained
            torch.testing.assert_close(new @ new.T, torch.eye(3).double(), rtol=0, atol=1e-5)
            assert (new @ (old / old.norm(dim=1, keepdim=True)).T).abs().max() < 1e-5


def test_where_there_is_no_room_new_components_are_orthonormal_among_themselves():
    """As if there were no others: what a projection leaves of them would be rounding."""
    earlier, drawn = torch.randn(8, 12), []
    for before in (earlier, earlier[:0]):
        torch.manual_seed(0)
        drawn.append(draw_orthonormal(5, before))
    assert torch.equal(*drawn)
    torch.testing.assert_close(drawn[0] @ drawn[0].T, torch.eye(5), rtol=0, atol=1e-5)


def test_components_of_earlier_tasks_stay_as_they_were_to_the_bit():
    method = Maker(CODAPrompt).after(2)
    before = {name: tensor.clone() for name, tensor in method.past.items()}
    learn_task(method, GROUPS[2])
    for name, tensor in method.past.items():
        assert len(tensor) == 3 and torch.equal(tensor[:2], before[name]) and not tensor.requires_grad
