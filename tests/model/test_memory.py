import pytest
import torch

from expect import expect_error
from protosteer.errors import LearnerError
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskMetadata, TaskRecord
from protosteer.paper.prototypes import Anchors, centroids


def record(name: str, n: int = 30, count: int = 3, seed: int = 0) -> tuple[ClassRecord, torch.Tensor]:
    embeddings = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return ClassRecord(name, embeddings[:2], centroids(embeddings, count)), embeddings


def test_class_variance_is_recovered_from_its_groups():
    one, embeddings = record("a")
    assert one.values.variance == pytest.approx(float(embeddings.var(dim=0, correction=0).mean()), abs=1e-6)
    assert one.images == 30


def test_prototypes_carry_the_noise_that_was_asked_for():
    (a, _), (b, _) = record("a"), record("b", seed=1)
    memory = Memory([TaskRecord("t", ClassTable.of([a]), None), TaskRecord("u", ClassTable.of([b]), None)])
    cluster = memory.anchors("cluster")
    assert torch.equal(cluster.scales, torch.cat([a.values.deviations, b.values.deviations]))
    assert torch.equal(cluster.means, torch.cat([a.values.means, b.values.means]))
    assert cluster.labels.tolist() == [0, 0, 0, 1, 1, 1]
    per_class = memory.anchors("class").scales[:, 0].tolist()
    assert per_class == pytest.approx([a.values.variance] * 3 + [b.values.variance] * 3)
    assert not memory.anchors("none").scales.any() and Memory().anchors("cluster") is None


@pytest.mark.parametrize("noise", ["cluster", "class", "none"])
def test_samples_are_perturbed_by_the_formula(noise):
    """mu + m * eps, normalised: m is a deviation per dimension, one variance per class, or 0."""
    (a, _), (b, _) = record("a"), record("b", seed=1)
    drawn_from = Memory([TaskRecord("t", ClassTable.of([a, b]), None)]).anchors(noise)
    torch.manual_seed(4)
    drawn, labels = drawn_from.sample(50)
    torch.manual_seed(4)
    rows, eps = torch.randint(6, (50,)), torch.randn(50, 4)
    means = torch.cat([a.values.means, b.values.means])
    scale = {
        "cluster": torch.cat([a.values.deviations, b.values.deviations]),
        "class": torch.tensor([[a.values.variance]] * 3 + [[b.values.variance]] * 3),
        "none": torch.zeros(6, 1),
    }[noise]
    raw = means[rows] + scale[rows] * eps
    torch.testing.assert_close(drawn, raw / raw.norm(dim=1, keepdim=True))
    assert labels.tolist() == [int(row >= 3) for row in rows]


def test_the_spread_of_samples_is_that_of_their_group():
    """Around a mean of length 100 a direction moves by m / 100, seen across the mean."""
    mean, scale = torch.tensor([[100.0, 0.0, 0.0]]), torch.tensor([[5.0, 2.0, 0.5]])
    torch.manual_seed(0)
    drawn, _ = Anchors(mean, scale, torch.zeros(1, dtype=torch.long)).sample(20_000)
    assert drawn[:, 1].std().item() == pytest.approx(0.02, rel=0.05)
    assert drawn[:, 2].std().item() == pytest.approx(0.005, rel=0.05)


def test_bytes_count_every_tensor():
    (a, _) = record("a")
    prompt = torch.zeros(2, 1, 4)
    keys, groups, counts = 2 * 4 * 4, 2 * 3 * 4 * 4, 3 * 8
    assert TaskRecord("t", ClassTable.of([a]), prompt).bytes == prompt.numel() * 4 + keys + groups + counts


def test_existing_names_are_refused():
    (a, _) = record("a")
    memory = Memory([TaskRecord("t", ClassTable.of([a]), None)])
    with expect_error("task-exists", LearnerError, name="t"):
        memory.check_new("t")
    with expect_error("task-exists", LearnerError, name="t"):
        Memory([*memory.tasks, *memory.tasks])


def test_forgetting_a_class_keeps_the_others_untouched():
    (a, _), (b, _) = record("a"), record("b", seed=1)
    memory = Memory(
        [TaskRecord("t", ClassTable.of([a, b]), torch.ones(1)), TaskRecord("u", ClassTable.of([record("c")[0]]), None)]
    )
    memory.remove(memory.tasks[0], ["a"])
    assert memory.classes == ["b", "c"] and torch.equal(memory.tasks[0].classes[0].keys, b.keys)
    memory.remove(memory.tasks[0], ["b"])
    assert memory.task_names == ["u"]
    with expect_error("unknown-class", LearnerError, name="b", known=["c"]):
        memory.tasks_of("b")
    with expect_error("unknown-task", LearnerError, name="t", known=["u"]):
        memory.task("t")


def test_what_is_known_of_a_task_survives_a_file():
    about = TaskMetadata({"epochs": 3}, 12, loss=0.5, learned="2026-11-16", held_out=2)
    assert TaskMetadata.from_dict({**about.to_dict(), "of a later version": 1}) == about
    assert TaskMetadata().to_dict() == {} and "accuracy" not in about.to_dict()
