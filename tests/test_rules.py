"""What every rule and reader must do, and what is special about each."""

from __future__ import annotations

import pytest
import torch

from conftest import easy_task, tiny_backbone
from many_toys import many, near
from protosteer.learner import Learner
from protosteer.rules import RULES, PaperReader
from protosteer.settings import Settings

QUICK = {"epochs": 1, "batch_size": 8, "neck_hidden": 16, "augmentation": "none", "centroids": 2}
CLASSES = ["cat", "ant", "bee", "dog"]


@pytest.fixture(scope="module", params=["paper", "best"])
def learner(request) -> Learner:
    learner = Learner(tiny_backbone(), Settings.preset(request.param, **QUICK))
    learner.learn(easy_task(CLASSES[:2]), name="first")
    learner.learn(easy_task(CLASSES[2:]), name="second")
    return learner


def test_a_reader_scores_every_class_and_names_what_led_to_it(learner):
    prediction = learner.predict(easy_task(learner.classes, per_class=3, seed=9)[0])
    ids = prediction.class_ids
    assert torch.equal(ids, torch.arange(4).expand(12, -1))
    explanations = learner.reader.explain(prediction)
    for row, explanation in enumerate(explanations):
        assert explanation["candidates"] == prediction.candidates[row]
        assert explanation["runner_up"] == prediction.ranked(2)[row][1][0] != prediction.labels[row]
    assert len(explanations) == 12


def test_directions_are_unit_vectors_in_the_order_of_the_classes(learner):
    directions = learner.reader.class_directions()
    assert torch.allclose(directions.norm(dim=1), torch.ones(4).double())
    prediction = learner.predict(easy_task(learner.classes, per_class=1, seed=9)[0])
    nearest = (prediction.embeddings.double() @ directions.T).argmax(dim=1)
    assert [learner.classes[i] for i in nearest.tolist()] == learner.classes


def test_errors_add_up_to_all_images(learner):
    images, labels = easy_task(learner.classes[:2], per_class=6, seed=3)
    embeddings = learner.backbone.embed_pixels(images)
    truth = torch.tensor([learner.classes.index(label) for label in labels])
    found = learner.reader.diagnose(lambda rows, _: embeddings[rows], truth, 0, torch.tensor([0, 1]))
    kinds = list(found)[:4]
    assert kinds[0] == "accuracy" and sum(found[kind] for kind in kinds) == pytest.approx(100)


def test_a_rule_knows_what_it_stored(learner):
    rule = learner.settings.rule
    own, other = RULES[rule], RULES["evidence" if rule == "paper" else "paper"]
    for task in learner.memory.tasks:
        assert own.has_stored(task.classes) and not other.has_stored(task.classes)
    assert (learner.reader.loo_predictions() is None) == learner.reader.needs_heldout
    assert bool(learner.reader.advice()) == learner.reader.needs_heldout


def test_cpp_inference_in_parts_is_cpp_inference():
    queries = near(many(2, 3), images=6)
    stored = many(2, 3).memory
    whole, parts = (PaperReader(stored, Settings.preset("paper")) for _ in range(2))
    parts.max_cosines = 2 * len(parts.index.values)  # two images at a time

    def embed(rows, tasks):
        return queries[rows] if tasks is None else queries[rows] + 0.1 * torch.sin(tasks)[:, None]

    ours, theirs = whole.match(embed, 6), parts.match(embed, 6)
    assert torch.allclose(ours.scores, theirs.scores, atol=1e-6)
    for part in ("candidates", "winners", "passes"):
        assert torch.equal(getattr(ours, part), getattr(theirs, part))


def test_a_reader_does_not_change_with_its_memory():
    memory = many(2, 3).memory
    reader = PaperReader(memory, Settings.preset("paper"))
    memory.remove(memory.tasks[0])
    assert len(reader.index.classes) == len(reader.class_directions()) == 6
