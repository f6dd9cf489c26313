"""What prediction is measured against does what it says."""

from __future__ import annotations

import pytest
import torch

from protosteer.bench import prediction
from protosteer.bench.subjects import memory_of, pictures, small

pytestmark = pytest.mark.slow


def test_late_prompts_retrieve_the_same_candidates():
    backbone = small(depth=4)
    pixels = pictures(backbone, 20)
    everywhere, late = (prediction.learner_for(backbone, k) for k in (1, 3))
    assert everywhere.memory.tasks[0].prompt.shape[0] == 4 and late.memory.tasks[0].prompt.shape[0] == 2
    candidates = everywhere.predict(pixels).candidates
    assert candidates == late.predict(pixels).candidates
    assert len({tuple(tasks) for tasks in candidates}) > 3  # images differ in what they retrieve


@pytest.mark.parametrize("passes", [3, 8, 19])
def test_the_limit_makes_the_passes_it_says(passes, monkeypatch):
    backbone = small()
    made = []
    monkeypatch.setattr(backbone.vit, "forward", lambda images: made.append(len(images)))
    prediction.plain_passes(backbone.vit, torch.zeros(8, 3, 16, 16), passes, 3)
    assert sum(made) == passes and max(made) <= 3


def test_the_best_batch_is_the_quickest(monkeypatch):
    times = {2: [3.0, 2.0], 4: [1.0, 5.0], 8: [2.0, 2.0]}
    monkeypatch.setattr(
        prediction, "interleaved", lambda sides, *_, **__: {size: times[size] for size in sides}
    )
    assert prediction.best_batch(small().vit, torch.zeros(8, 3, 16, 16), (2, 4, 8)) == 4


def test_all_ratios_of_the_subject(monkeypatch):
    monkeypatch.setattr(prediction, "vit_tiny", lambda: small(depth=3))
    for name in ("IMAGES", "NANO_IMAGES", "FEW_IMAGES", "FEW_NANO_IMAGES"):
        monkeypatch.setattr(prediction, name, 4)
    monkeypatch.setattr(prediction, "LATE", (2,))
    ratios = prediction.run(1)
    assert [ratio.name for ratio in ratios] == [
        "predict", "predict_nano", "late_predict_k2", "late_predict_nano_k2",
    ]  # fmt: skip
    assert all(ratio.value > 0 for ratio in ratios)


def test_memory_of_has_the_shape_asked_for():
    backbone = small(depth=3)
    memory = memory_of(backbone, tasks=2, classes_per_task=3, centroids=4, prompt_from_layer=2)
    assert len(memory) == 2 and len(memory.classes) == 6
    record = memory.tasks[1].classes[2]
    assert record.keys.shape == record.values.means.shape == (4, backbone.dim)
