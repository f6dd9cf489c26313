from __future__ import annotations

import pytest
import torch

from protosteer.errors import LearnerError
from protosteer.method.memory import ClassRecord, Memory, TaskRecord
from protosteer.method.prototypes import centroids


def record(name: str, n: int = 30, count: int = 3, seed: int = 0) -> tuple[ClassRecord, torch.Tensor]:
    embeddings = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return ClassRecord(name, embeddings[:2], centroids(embeddings, count)), embeddings


def test_class_variance_is_recovered_from_its_groups():
    one, embeddings = record("a")
    assert one.variance == pytest.approx(float(embeddings.var(dim=0, correction=0).mean()), abs=1e-6)
    assert one.images == 30


def test_anchors_carry_the_noise_that_was_asked_for():
    (a, _), (b, _) = record("a"), record("b", seed=1)
    memory = Memory([TaskRecord("t", (a,), None), TaskRecord("u", (b,), None)])
    cluster = memory.anchors("cluster")
    assert torch.equal(cluster.scales, torch.cat([a.values.deviations, b.values.deviations]))
    assert torch.equal(cluster.means, torch.cat([a.values.means, b.values.means]))
    assert cluster.labels.tolist() == [0, 0, 0, 1, 1, 1]
    per_class = memory.anchors("class").scales[:, 0].tolist()
    assert per_class == pytest.approx([a.variance] * 3 + [b.variance] * 3)
    assert not memory.anchors("none").scales.any()
    assert Memory().anchors("cluster") is None


def test_samples_are_normalised_and_follow_mean_and_scale():
    (a, _) = record("a", count=1)
    anchors = Memory([TaskRecord("t", (a,), None)]).anchors("cluster")
    still = Memory([TaskRecord("t", (a,), None)]).anchors("none")
    torch.manual_seed(0)
    drawn, labels = anchors.sample(4000)
    torch.testing.assert_close(drawn.norm(dim=1), torch.ones(4000))
    assert labels.tolist() == [0] * 4000 and drawn.std(dim=0).min() > 0.1
    expected = torch.nn.functional.normalize(a.values.means, dim=1)
    torch.testing.assert_close(still.sample(5)[0], expected.expand(5, -1))


def test_bytes_count_every_tensor():
    (a, _) = record("a")
    prompt = torch.zeros(2, 1, 4)
    keys, groups, counts = 2 * 4 * 4, 2 * 3 * 4 * 4, 3 * 8
    assert TaskRecord("t", (a,), prompt).bytes == prompt.numel() * 4 + keys + groups + counts


def test_existing_names_are_refused():
    (a, _) = record("a")
    memory = Memory([TaskRecord("t", (a,), None)])
    with pytest.raises(LearnerError, match="task named 't' exists"):
        memory.check_new("t", ["b"])
    with pytest.raises(LearnerError, match="class 'a' was learned in task 't'"):
        memory.check_new("u", ["b", "a"])


def test_forgetting_a_class_keeps_the_others_untouched():
    (a, _), (b, _) = record("a"), record("b", seed=1)
    memory = Memory([TaskRecord("t", (a, b), torch.ones(1)), TaskRecord("u", (record("c")[0],), None)])
    memory.forget_class("a")
    assert memory.classes == ["b", "c"] and memory.tasks[0].classes[0] is b
    memory.forget_class("b")
    assert memory.task_names == ["u"]
    with pytest.raises(LearnerError, match="no class named 'b'; there are: c"):
        memory.forget_class("b")
    with pytest.raises(LearnerError, match="no task named 't'; there are: u"):
        memory.forget_task("t")
