"""What the scaling benchmark times is what `Learner.predict` does beside the backbone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from protosteer.bench import scaling
from protosteer.bench.harness import memory_of
from protosteer.method.inference import Index
from vit_toys import small

pytestmark = pytest.mark.slow


def test_overhead_is_a_whole_match_from_ready_embeddings():
    memory = memory_of(small(), tasks=4, classes=10)
    embeddings = torch.randn(6, small().dim)
    matches = scaling.overhead(Index.build(memory), embeddings)
    classes = [record for task in memory.tasks for record in task.classes]
    cosines = [F.cosine_similarity(embeddings[:, None], c.values.means, dim=2).amax(dim=1) for c in classes]
    torch.testing.assert_close(matches.scores, torch.stack(cosines, dim=1))
    assert matches.forward_passes == 6 + int(matches.candidates.sum())


def test_the_ratio_is_the_backbones_part_of_the_whole(monkeypatch):
    seconds = {"backbone": [0.03 * 4], "rest": [0.01 * scaling.MOST_IMAGES]}
    matches = SimpleNamespace(forward_passes=3 * scaling.MOST_IMAGES)
    for name, value in {
        "vit_tiny": small,
        "best_batch": lambda _: torch.zeros(4, 3, 16, 16),
        "interleaved": lambda *_: seconds,
        "overhead": lambda *_: matches,
        "CLASSES": (50, 100),
        "JUDGED": 100,
    }.items():
        monkeypatch.setattr(scaling, name, value)
    (ratio,) = scaling.run(1)
    assert (ratio.name, ratio.value, ratio.target) == ("many_classes", pytest.approx(0.9), 0.95)
    cost = "10.00 ms an image beside 90 ms of 3.0 backbone passes"
    assert ratio.notes == [f"50 classes, 5 tasks: {cost}", f"100 classes, 10 tasks: {cost}"]
