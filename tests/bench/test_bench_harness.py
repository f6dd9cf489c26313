"""Ratios come from sides that run in turn, on random subjects that behave like real ones."""

from __future__ import annotations

import pytest

from protosteer.bench.harness import Ratio, by_layer, interleaved, learner_for, pictures, quarters
from vit_toys import small

pytestmark = pytest.mark.slow


def test_a_ratio_is_of_medians_and_its_spread_of_single_repeats():
    ratio = Ratio("", "", [2.0, 4.0, 9.0], [1.0, 2.0, 3.0], 1.0)
    assert (ratio.value, ratio.spread) == (2.0, 1.0)


def test_sides_take_turns_and_the_first_round_is_not_counted():
    ran: list[str] = []
    times = interleaved({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 2)
    assert "".join(ran) == "baabba"
    assert [len(seconds) for seconds in times.values()] == [2, 2]


def test_late_prompts_are_compared_with_prompts_in_all_layers(monkeypatch):
    seconds = {0: [9.0], 1: [6.0], 4: [4.0]}
    monkeypatch.setattr(
        "protosteer.bench.harness.interleaved", lambda sides, _: {k: seconds[k] for k in sides}
    )
    step, late = by_layer("training_step_nano", "", 20, dict.fromkeys(seconds, print), 1.6, 1)
    assert (step.name, step.value, step.target) == ("training_step_nano", 1.5, 1.6)
    assert (late.name, late.value, late.target) == ("late_training_nano_k4", 1.5, 1.0)
    assert step.notes == ["450.00 ms an image against 300.00"]
    assert late.notes == ["300.00 ms an image against 200.00"]


@pytest.mark.parametrize(("depth", "layers"), [(12, [1, 4, 7, 10]), (3, [1, 2])])
def test_prompts_begin_in_every_quarter(depth, layers):
    assert list(quarters(small(depth))) == layers


def test_late_prompts_retrieve_the_same_candidates():
    backbone = small(depth=4)
    pixels = pictures(backbone, 20)
    everywhere, late = (learner_for(backbone, k) for k in (1, 3))
    assert everywhere.memory.tasks[0].prompt.shape[0] == 4 and late.memory.tasks[0].prompt.shape[0] == 2
    candidates = everywhere.predict(pixels).candidates
    assert candidates == late.predict(pixels).candidates
    assert len({tuple(tasks) for tasks in candidates}) > 3  # images differ in what they retrieve
