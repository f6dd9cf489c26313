"""What the scaling benchmark times is what `Learner.predict` does beside the backbone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from protosteer.bench import scaling
from protosteer.bench.harness import memory_of
from protosteer.learner import Learner
from protosteer.settings import Settings
from vit_toys import small

pytestmark = pytest.mark.slow


def test_overhead_is_a_whole_match_from_ready_embeddings():
    learner = Learner(small(), Settings.preset("paper"))
    learner.memory = memory = memory_of(small(), tasks=4, classes=10)
    embeddings = torch.randn(6, small().dim)
    matches = scaling.overhead(learner, embeddings)
    classes = [record for task in memory.tasks for record in task.classes]
    cosines = [F.cosine_similarity(embeddings[:, None], c.values.means, dim=2).amax(dim=1) for c in classes]
    torch.testing.assert_close(matches.scores, torch.stack(cosines, dim=1))
    assert int(matches.passes.sum()) == 6 + sum(map(len, matches.candidates))


def test_the_ratio_is_the_backbones_part_of_the_whole(monkeypatch):
    seconds = {"backbone": [0.03 * 4], "rest": [0.01 * scaling.MOST_IMAGES]}
    matches = SimpleNamespace(passes=torch.full((scaling.MOST_IMAGES,), 3))
    for name, value in {
        "vit_tiny": small,
        "best_batch": lambda _: torch.zeros(4, 3, 16, 16),
        "interleaved": lambda *_: seconds,
        "overhead": lambda *_: matches,
        "CLASSES": (50, 100),
        "JUDGED": 100,
    }.items():
        monkeypatch.setattr(scaling, name, value)
    ratios = scaling.run(1)
    assert [ratio.name for ratio in ratios] == ["many_classes", "many_classes_evidence"]
    for ratio in ratios:
        assert (ratio.value, ratio.target) == (pytest.approx(0.9), 0.95)
        cost = "10.00 ms an image beside 90 ms of 3.0 backbone passes"
        assert ratio.notes[0].startswith(f"50 classes, 5 tasks: {cost}; ")
        assert ratio.notes[1].startswith(f"100 classes, 10 tasks: {cost}; ")
