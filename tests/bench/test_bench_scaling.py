"""What the scaling benchmark times is what `Learner.predict` does beside the backbone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from protosteer.bench import scaling
from protosteer.bench.subjects import pictures, small
from protosteer.method.inference import Index

pytestmark = pytest.mark.slow


def test_the_random_memory_has_the_classes_and_tasks_asked_for():
    memory = scaling.random_memory(100, 7)
    assert len(memory) == 7
    assert sorted(memory.classes) == sorted(f"class-{k}" for k in range(100))
    assert memory.tasks[0].classes[0].keys.shape == (scaling.CENTROIDS, scaling.DIM)


def test_overhead_is_a_whole_match_from_ready_embeddings():
    memory = scaling.random_memory(40, 4)
    embeddings = torch.randn(6, scaling.DIM)
    matches = scaling.overhead(Index.build(memory), embeddings)
    classes = [record for task in memory.tasks for record in task.classes]
    cosines = [F.cosine_similarity(embeddings[:, None], c.values.means, dim=2).amax(dim=1) for c in classes]
    torch.testing.assert_close(matches.scores, torch.stack(cosines, dim=1))
    assert matches.forward_passes == 6 + int(matches.candidates.sum())


def test_a_point_counts_passes_and_repeats():
    backbone = small()
    ready = backbone.preprocessing(pictures(backbone, 4))
    point = scaling.point(backbone.vit, ready, 4, classes=50, tasks=5, repeats=3)
    assert len(point.backbone) == len(point.overhead) == 3
    assert 2 < point.passes <= 4  # three neighbours, mostly of different tasks
    assert str(point).startswith("50 classes, 5 tasks: ")


def test_a_points_share_is_overhead_over_backbone():
    point = scaling.Point(100, 10, 3.0, [0.1, 0.1], [0.002, 0.002], 0.5)
    assert point.share == pytest.approx(2.0)
    assert str(point) == "100 classes, 10 tasks: 2.00 ms an image, 2.0 %; index made in 0.50 s"


def test_the_ratio_is_the_backbones_part_of_the_whole(monkeypatch):
    point = scaling.Point(scaling.JUDGED, 1000, 3.0, [0.09, 0.09], [0.01, 0.01], 0.5)
    monkeypatch.setattr(scaling, "curve", lambda repeats: [point])
    (ratio,) = scaling.run(2)
    assert (ratio.name, ratio.value, ratio.target) == ("many_classes", pytest.approx(0.9), 0.95)
    assert str(point) in ratio.notes
