"""The references of the prediction benchmark compute what prediction computes."""

from __future__ import annotations

import pytest
import torch

from protosteer.bench import prediction
from protosteer.bench.subjects import concatenating, memory_of, pictures, small
from protosteer.learner import Learner

pytestmark = pytest.mark.slow

IMAGES = 20


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_the_concatenating_forward_equals_ours(pool):
    backbone = small(pool=pool)
    images = backbone.preprocessing(pictures(backbone, 4))
    prompt = torch.randn(backbone.prompt_shape(2))
    torch.testing.assert_close(concatenating(backbone.vit, images, prompt), backbone.embed(images, prompt))
    torch.testing.assert_close(concatenating(backbone.vit, images), backbone.embed(images))


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_the_authors_way_gives_our_labels(pool):
    backbone = small(pool=pool)
    learner, pixels = prediction.learner_for(backbone), pictures(backbone, IMAGES)
    predicted = learner.predict(pixels)
    assert prediction.authors_labels(learner, pixels, batch=8) == predicted.labels
    assert len(set(predicted.labels)) > 3  # agreement means something
    assert len({tuple(tasks) for tasks in predicted.candidates}) > 3


def test_late_prompts_retrieve_the_same_candidates():
    backbone = small(depth=4)
    pixels = pictures(backbone, IMAGES)
    everywhere, late = (prediction.learner_for(backbone, k) for k in (1, 3))
    assert everywhere.memory.tasks[0].prompt.shape[0] == 4 and late.memory.tasks[0].prompt.shape[0] == 2
    assert everywhere.predict(pixels).candidates == late.predict(pixels).candidates


@pytest.mark.parametrize("passes", [3, 8, 19])
def test_the_limit_makes_the_passes_it_says(passes, monkeypatch):
    backbone = small()
    made = []
    monkeypatch.setattr(backbone.vit, "forward", lambda images: made.append(len(images)))
    prediction.plain_passes(backbone.vit, torch.zeros(8, 3, 16, 16), passes, 3)
    assert sum(made) == passes and max(made) <= 3


def test_best_batch_is_one_of_those_tried():
    backbone = small()
    ready = backbone.preprocessing(pictures(backbone, 4))
    assert prediction.best_batch(backbone.vit, ready, (2, 4)) in (2, 4)


def test_ratios_have_their_names_and_count_each_repeat():
    backbone = small(depth=3)
    ratio = prediction.against_limit("predict", backbone, 8, 2)
    assert (ratio.name, ratio.target) == ("predict", 0.95) and ratio.value > 0
    ratios = prediction.against_authors("predict_authors", backbone, 4, 2, late=(2,))
    assert [r.name for r in ratios] == ["predict_authors", "late_predict_k2"]


def test_memory_of_has_the_shape_asked_for():
    backbone = small(depth=3)
    memory = memory_of(backbone, tasks=2, classes_per_task=3, centroids=4, prompt_from_layer=2)
    assert len(memory) == 2 and len(memory.classes) == 6
    record = memory.tasks[1].classes[2]
    assert record.keys.shape == record.values.means.shape == (4, backbone.dim)
    learner = Learner(backbone)
    learner.memory = memory
    assert len(learner.predict(pictures(backbone, 2))) == 2
