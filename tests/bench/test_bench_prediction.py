"""What prediction is measured against does what it says."""

from __future__ import annotations

import pytest
import torch

from protosteer.bench import prediction
from vit_toys import small

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("passes", [2, 9, 19])
def test_the_limit_makes_the_passes_it_says(passes, monkeypatch):
    backbone = small()
    made = []
    monkeypatch.setattr(backbone.vit, "forward", lambda images: made.append(len(images)))
    prediction.plain_passes(backbone.vit, torch.zeros(3, 3, 16, 16), passes)
    assert sum(made) == passes and max(made) <= 3


def test_the_best_batch_is_the_quickest(monkeypatch):
    times = {8: [3.0, 2.0], 16: [1.0, 5.0], 32: [2.0, 2.0], 64: [4.0, 4.0]}
    monkeypatch.setattr(prediction, "interleaved", lambda sides, _: {size: times[size] for size in sides})
    assert len(prediction.best_batch(small())) == 16


def test_all_ratios_of_the_subject(monkeypatch):
    for name, value in {"vit_tiny": small, "IMAGES": 4, "NANO_IMAGES": 4, "BATCHES": (2, 4)}.items():
        monkeypatch.setattr(prediction, name, value)
    ratios = prediction.run(1)
    assert [r.name for r in ratios] == ["predict", "late_predict_k2", "predict_nano", "late_predict_nano_k2"]
    assert all(ratio.value > 0 for ratio in ratios)
