"""What `inspect` tells of a model: every figure against the plainest way to find it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conftest import easy_task, tiny_backbone
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.file import Model, read
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskMetadata, TaskRecord
from protosteer.paper.prototypes import Centroids
from protosteer.rules import reader_of
from protosteer.settings import Settings
from protosteer.workflows import model_summary
from protosteer.workflows.model_summary import correction

BACKBONE = {"name": "tiny", "fingerprint": "ab" * 32, "dim": 24, "depth": 2, "image_size": 16, "heads": 3,
            "preprocessing": {"crop": 1.0}, "weights": None}  # fmt: skip


def some_class(name: str, values: torch.Tensor, held_out: int = 0) -> ClassRecord:
    counts = torch.arange(1, len(values) + 1)
    similarities = torch.rand(held_out) if held_out else None
    return ClassRecord(name, torch.randn(3, values.shape[1]), Centroids(values, values.abs(), counts), similarities)


def some_memory(classes: int, dim: int = 24, most: int = 4, seed: int = 0) -> Memory:
    """Classes with 1 to `most` centroids each, two to a task; embeddings have a few strong directions."""
    generator = torch.Generator().manual_seed(seed)
    strength = torch.arange(1, dim + 1) ** -0.7
    records = []
    for i in range(classes):
        count = int(torch.randint(1, most + 1, (), generator=generator))
        middle = torch.randn(1, dim, generator=generator)
        group = (middle + 0.5 * torch.randn(count, dim, generator=generator)) * strength
        records.append(some_class(f"c{i}", group * (i + 1)))
    return Memory(TaskRecord(f"t{i}", ClassTable.of(records[i : i + 2]), None) for i in range(0, classes, 2))


def plainly(memory: Memory) -> torch.Tensor:
    records = [record for task in memory.tasks for record in task.classes]
    rows = [
        [max(float(F.cosine_similarity(x, y, dim=0)) for x in a.values.means for y in b.values.means) for b in records]
        for a in records
    ]  # fmt: skip
    return torch.tensor(rows).fill_diagonal_(1.0)


@pytest.mark.parametrize("cells", [1, 300, 2**23])
def test_likeness_is_that_of_the_two_nearest_centroids(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    monkeypatch.setattr(model_summary, "_CELLS", cells)
    memory = some_memory(20)
    names, matrix = model_summary.similarity(memory)
    assert names == memory.classes
    assert torch.allclose(matrix, plainly(memory), atol=1e-6)
    assert torch.equal(matrix, matrix.T) and torch.equal(matrix.diagonal(), torch.ones(20))
    pairs = [(float(matrix[i, j]), names[i], names[j]) for i, j in itertools.combinations(range(20), 2)]
    wanted = sorted(pairs, key=lambda pair: -pair[0])
    for most in (1, 10, 200):
        found = model_summary.closest(memory, most)
        assert [(pair.a, pair.b) for pair in found] == [(a, b) for _, a, b in wanted[:most]]
        assert [pair.similarity for pair in found] == pytest.approx([s for s, *_ in wanted[:most]], abs=1e-6)


@pytest.mark.parametrize("cells", [1, 60, 2**23])
def test_of_equal_pairs_those_of_earlier_classes_come_first(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    monkeypatch.setattr(model_summary, "_CELLS", cells)
    records = tuple(some_class(f"c{i}", torch.eye(3)[[i % 3]]) for i in range(12))
    found = model_summary.closest(Memory([TaskRecord("t", ClassTable.of(records), None)]), 5)
    pairs = [("c0", "c3"), ("c0", "c6"), ("c0", "c9"), ("c1", "c4"), ("c1", "c7")]
    assert found == [(*pair, 1.0) for pair in pairs]


@pytest.mark.parametrize("classes", [0, 1, 2])
def test_few_classes(classes: int) -> None:
    memory = some_memory(classes)
    names, matrix = model_summary.similarity(memory)
    assert matrix.shape == (classes, classes) and names == memory.classes
    assert len(model_summary.closest(memory)) == (classes == 2)
    assert not model_summary.closest(memory, most=0)


def test_equal_classes_are_alike_and_a_zero_centroid_is_like_nothing() -> None:
    same = torch.randn(2, 24)
    records = (some_class("a", same), some_class("b", 5 * same), some_class("none", torch.zeros(1, 24)))
    first, *others = model_summary.closest(Memory([TaskRecord("t", ClassTable.of(records), None)]))
    assert first[:2] == ("a", "b") and first.similarity == pytest.approx(1.0) and first.similarity <= 1.0
    assert [pair.similarity for pair in others] == [0.0, 0.0]


def model(tmp_path: Path, tasks: list[TaskRecord], **settings: object) -> Model:
    path = tmp_path / "m.protosteer"
    path.write_bytes(b"x" * 1000)
    return Model(path, dict(BACKBONE), Settings.preset("paper", **settings), Memory(tasks))


def two_tasks() -> list[TaskRecord]:
    """A trained task of two classes with 3 and 6 images, and a few-shot one of one class with one image."""
    prompt = torch.zeros(2, 1, 24)
    first = (some_class("cat", torch.randn(2, 24), 4), some_class("dog", torch.randn(3, 24), 1))
    about = TaskMetadata(images=9, learned="2026-11-16", image_bytes=50_000, loss=1.5, accuracy=90.0)
    later = TaskMetadata(images=1, learned="2026-12-01", image_bytes=10_000)
    return [
        TaskRecord("spring", ClassTable.of(first), prompt, True, about),
        TaskRecord("owl", ClassTable.of([some_class("owl", torch.randn(1, 24))]), prompt, False, later, few_shot=True),
    ]


def described(one: Model) -> dict[str, Any]:
    return model_summary.describe(one, reader_of(one.memory, one.settings))


def test_every_figure_of_a_model(tmp_path: Path) -> None:
    told = described(model(tmp_path, two_tasks(), epochs=3, independent=True))
    assert told["file"] == {"path": str(tmp_path / "m.protosteer"), "bytes": 1000}
    assert told["backbone"] == {k: v for k, v in BACKBONE.items() if k != "heads"}
    assert told["settings"]["all"] == Settings.preset("paper", epochs=3, independent=True).to_dict()
    assert told["settings"]["changed"] == [
        {"name": "prompt_tasks", "value": "all", "default": "first"},
        {"name": "epochs", "value": 3, "default": 15},
        {"name": "batch_size", "value": 256, "default": 50},
        {"name": "rule", "value": "paper", "default": "evidence"},
        {"name": "feature_layers", "value": "last", "default": "several"},
        {"name": "independent", "value": True, "default": False},
    ]
    cat = (3 + 2 + 2) * 24 * 4 + 2 * 8 + 4 * 4
    dog = (3 + 3 + 3) * 24 * 4 + 3 * 8 + 1 * 4
    owl = (3 + 1 + 1) * 24 * 4 + 1 * 8
    prompt = {"layers": 2, "length": 1, "bytes": 2 * 24 * 4}
    spring, few_shot = told["tasks"]
    assert spring["classes"] == [
        {"name": "cat", "images": 3, "keys": 3, "values": 2, "points": None, "bytes": cat, "held_out": 4},
        {"name": "dog", "images": 6, "keys": 3, "values": 3, "points": None, "bytes": dog, "held_out": 1},
    ]
    assert {k: v for k, v in spring.items() if k != "classes"} == {
        "name": "spring", "learned": "2026-11-16", "images": 9, "image_bytes": 50_000,
        "bytes": cat + dog + 192, "prompt": prompt, "trained": True, "few_shot": False, "unfinished": False, "corrected": None, "confirmed": False, "compacted": False,
        "independent": True, "precision": "fp32", "held_out": None,
        "loss": 1.5, "accuracy": 90.0,
    }  # fmt: skip
    assert few_shot["few_shot"] and not few_shot["trained"] and few_shot["loss"] is None
    total = cat + dog + owl + 2 * 192
    assert told["totals"] == {
        "classes": 3, "tasks": 2, "images": 10, "centroids": 3 * 3 + 2 + 3 + 1, "points": 0, "bytes": total,
        "bytes_per_class": total / 3, "bytes_per_task": total / 2, "image_bytes": 60_000, "times_smaller": 60.0,
        "first_learned": "2026-11-16", "last_learned": "2026-12-01",
    }  # fmt: skip
    assert told["rejection"] == {"calibrated": True, "images": 5, "held_out": 5}
    assert told["rule"] == "paper" and told["evidence"] is None
    assert len(told["confusable"]) == 3 and set(told["confusable"][0]) == {"a", "b", "similarity"}
    assert json.loads(json.dumps(told)) == told


def test_what_is_not_known_is_none(tmp_path: Path) -> None:
    bare = TaskRecord("t", ClassTable.of([some_class("a", torch.randn(2, 24))]), None)
    read = model(tmp_path, [*two_tasks(), bare])
    del read.backbone["dim"]  # as in an older file
    told = described(read)
    assert told["backbone"]["dim"] is None
    assert told["tasks"][2]["prompt"] is None and not told["tasks"][2]["trained"]
    assert told["tasks"][2]["learned"] is None and told["tasks"][2]["accuracy"] is None
    assert told["totals"]["image_bytes"] is None and told["totals"]["times_smaller"] is None
    assert told["totals"]["last_learned"] == "2026-12-01"
    read.memory.remove(read.memory.tasks[0], ["dog"])
    assert told["tasks"][0]["image_bytes"] == 50_000
    assert described(read)["tasks"][0]["image_bytes"] is None


def test_a_model_that_was_not_written_and_one_without_tasks(tmp_path: Path) -> None:
    told = described(Model(tmp_path / "none", dict(BACKBONE), Settings.preset("paper"), Memory()))
    assert told["file"]["bytes"] is None and told["totals"]["bytes_per_class"] is None
    assert told["confusable"] == [] and not told["rejection"]["calibrated"]


def test_by_evidence_the_views_and_what_calibrates_them_are_told(tmp_path: Path) -> None:
    learner = Learner(tiny_backbone(), Settings.preset("best", epochs=1, neck_hidden=16, augmentation="none"))
    learner.learn(easy_task(["ant", "bee"], per_class=60), name="spring")
    learner.add_class("cat", easy_task(["cat"], per_class=3)[0])
    learner.save(tmp_path / "m.protosteer")
    told = model_summary.describe(read(tmp_path / "m.protosteer"), learner.reader)
    domain = learner.memory.shared_prompt
    assert told["rule"] == "evidence" and told["notes"] == []
    assert told["evidence"] == {
        "domain_prompt": {"layers": domain.shape[0], "length": 1, "bytes": domain.nbytes},
        "views": [{"prompt": v.prompt is not None, "weight": v.weight} for v in learner.reader.classifier.passes],
        "shares": learner.reader.classifier.passes[0].scorer.shares.tolist(),
        "left_out": 8 + 8 + 3,
    }
    assert told["rejection"] == {"calibrated": True, "images": 19, "held_out": 0}
    assert [c["points"] for task in told["tasks"] for c in task["classes"]] == [27, 27, 3]
    assert told["totals"]["points"] == 57
    for task, record in zip(told["tasks"], learner.memory.tasks, strict=True):
        prompt = task["prompt"]["bytes"] if task["prompt"] else 0
        assert sum(c["bytes"] for c in task["classes"]) + prompt == task["bytes"] == record.bytes
    assert json.loads(json.dumps(told)) == told


def test_notes_say_what_a_model_could_do_better(tmp_path: Path) -> None:
    first, second = two_tasks()
    late = replace(second, metadata=replace(second.metadata, unfinished=True))
    memory = Memory([first, late])
    rule, unfinished = model_summary.notes(memory, reader_of(memory, Settings()))
    assert "CPP inference" in rule and "new model" in rule
    assert unfinished.startswith("training of 'owl' was interrupted")
    assert model_summary.notes(Memory(), reader_of(Memory(), Settings())) == []


def test_the_log_of_corrections_is_utf8_whatever_the_name_of_a_file():
    metadata = SimpleNamespace(learned=None, file="pic\udcff.png")
    task = SimpleNamespace(class_names=["cat"], name="t", metadata=metadata, corrected_from=None, confirmed=False)
    assert "pic" in correction(task)["image"].encode().decode()
