"""What seeds draw, and what is told of a backbone, on a set whose classes are colours."""

from __future__ import annotations

import pytest
import torch

import mini_scores
from conftest import tiny_backbone
from protosteer.methods.cpp import CPP
from protosteer.settings import Settings

pytestmark = pytest.mark.slow


def colours() -> tuple[mini_scores.Part, mini_scores.Part]:
    """Four classes of twelve images, each of its own colour, with some noise."""
    gen = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat(12)
    base = torch.tensor([[220, 20, 20], [20, 220, 20], [20, 20, 220], [200, 200, 20]])[labels]
    noise = torch.randint(0, 30, (48, 3, 8, 8), generator=gen)
    part = (base[:, :, None, None] + noise).byte(), labels
    return part, part


COLOURS = mini_scores.Drawing(colours, learned=6, tested=4, tasks=2, classes=4)


def test_a_seed_draws_images_of_every_class_and_another_seed_others():
    _, labels = colours()[0]
    first, again, other = (
        mini_scores.drawn(labels, 4, 6, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (labels[first] == torch.arange(4)[:, None]).all()
    assert all(len(set(rows)) == 6 for rows in first.tolist())


def test_a_stream_has_the_classes_in_order_each_with_its_images():
    stream = COLOURS.stream("colours", 0)
    assert [task.classes for task in stream] == [["0", "1"], ["2", "3"]]
    assert [len(task.train) for task in stream] == [12, 12] and [len(task.test) for task in stream] == [8, 8]
    pixels = stream[1].test.pixels(range(8)).float().mean(dim=(2, 3))
    assert pixels.argmax(dim=1).tolist()[:4] == [2] * 4, "class 2 is blue"


@pytest.fixture
def quick(monkeypatch):
    trained = Settings.preset("best", epochs=1, batch_size=8, neck_hidden=8, centroids=2)
    monkeypatch.setitem(mini_scores.WAYS, "best", (mini_scores.Protosteer, trained))


def test_what_is_told_of_prompts_is_what_the_paper_s_diagnosis_says(quick):
    backbone, stream = tiny_backbone(), COLOURS.stream("colours", 0)
    found = mini_scores.score(backbone, stream, ["class means", "best"])
    assert set(found) == {"class means", "best", "true_task_with_prompt", "true_task_without_prompt"}
    method = CPP(backbone, mini_scores.WAYS["best"][1].replace(rule="paper"))
    run = mini_scores.run_stream(method, stream)
    for kind in ("true_task_with_prompt", "true_task_without_prompt"):
        assert found[kind] == pytest.approx(run.diagnosis["mean"][kind])


def test_a_summary_is_mean_and_deviation_over_seeds():
    told = mini_scores.summary([{"instant": 90.0}, {"instant": 94.0}])
    assert told["mean"] == {"instant": 92.0} and told["std"] == {"instant": pytest.approx(2.83)}
