"""The paper's rule by searches against looking at every key and value, on sets small enough for both."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from conftest import tiny_backbone
from many_toys import DIM, cloud, near
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Centroids
from protosteer.prediction import Prediction
from protosteer.search import candidates as shortlisting
from protosteer.search import ivf as searching
from protosteer.search.ivf import Lists
from protosteer.settings import Settings

IMAGES = 40


@pytest.fixture
def small(monkeypatch):
    """What is for very many classes, for a few hundred."""
    monkeypatch.setattr(shortlisting, "FROM", 100)
    monkeypatch.setattr(searching, "LISTS_FROM", 100)
    monkeypatch.setattr(searching, "_PER_LIST", 20)
    monkeypatch.setattr(searching, "PROBED", (14, 14))


def record(name: str, seed: int) -> ClassRecord:
    """With two keys, and one to three value centroids."""
    made, count = cloud(name, seed), 1 + seed % 3
    noise = 0.3 * torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed + 10_000))
    means = F.normalize(made.values.means + noise, dim=1)
    values = Centroids(means, torch.zeros(count, DIM), torch.ones(count, dtype=torch.int64))
    return dataclasses.replace(made, values=values, plain=None)


def paper(tasks: int = 20, classes: int = 10) -> Learner:
    """Every third task has no prompt."""
    learner = Learner(tiny_backbone(), Settings(rule="paper", neighbours=4))
    shape, generator = learner.backbone.prompt_shape(1), torch.Generator().manual_seed(0)
    learner.memory = Memory(
        TaskRecord(
            f"task-{t}",
            tuple(record(f"class-{t}-{k}", t * classes + k) for k in range(classes)),
            torch.randn(shape, generator=generator) if t % 3 else None,
        )
        for t in range(tasks)
    )
    return learner


def matched(learner: Learner, seen: torch.Tensor):
    """Among all classes, and among candidates."""

    def embed(rows: torch.Tensor, tasks: torch.Tensor | None) -> torch.Tensor:
        return (
            seen[rows] if tasks is None else seen[rows] + 0.2 * torch.sin(tasks[:, None] + torch.arange(DIM))
        )

    return learner.match(embed, len(seen)), learner.match(embed, len(seen), every=False)


def test_candidates_are_scored_as_among_all_classes(small, monkeypatch):
    monkeypatch.setattr(searching, "available", lambda: False)
    learner = paper()
    everything, some = matched(learner, near(learner))
    assert some.columns is not None and some.columns.shape == (IMAGES, shortlisting.CANDIDATES)
    assert all(len(set(row)) == len(row) for row in some.columns.tolist())
    assert int(some.passes.max()) > 2  # so that several prompts had a say
    for part in ("candidates", "winners", "passes", "embeddings"):
        assert torch.equal(getattr(everything, part), getattr(some, part))
    assert torch.allclose(some.scores, everything.scores.gather(1, some.columns), atol=1e-6)
    # The sample holds every class, so that the rest is known exactly.
    dense, sparse = (Prediction.build(learner.index, m, learner.temperature) for m in (everything, some))
    assert dense.labels == sparse.labels and dense.tasks == sparse.tasks
    assert torch.allclose(sparse.probabilities, dense.probabilities.gather(1, some.columns), atol=1e-6)
    assert torch.allclose(sparse.energy, dense.energy, atol=1e-5)


def test_lists_give_what_looking_everywhere_gives_wherever_they_find_it(small):
    pytest.importorskip("faiss", reason="faiss is not installed")
    learner = paper()
    assert isinstance(learner.nearby.keys, Lists) and isinstance(learner.nearby.values, Lists)
    everything, some = matched(learner, near(learner))
    same = (everything.candidates == some.candidates).all(dim=1)  # what was retrieved
    best = everything.scores.argmax(dim=1, keepdim=True)
    found = same & (some.columns == best).any(dim=1)
    assert float(found.float().mean()) >= 0.9
    mine = some.columns.gather(1, some.scores.argmax(dim=1, keepdim=True))
    assert torch.equal(mine[found], best[found])
    assert torch.allclose(some.scores[found], everything.scores.gather(1, some.columns)[found], atol=1e-6)


def test_lists_follow_classes_that_come_and_go(small):
    pytest.importorskip("faiss", reason="faiss is not installed")
    learner = paper()
    before = learner.nearby
    assert learner.nearby is before
    learner.forget("class-3-4")
    learner.memory.add(TaskRecord("new", (record("new", 12345),), None))
    after = learner.nearby
    for old, new in zip(before.partitions, after.partitions, strict=True):
        assert new.centroids is old.centroids and 0 < new.changed <= 6
    for vectors, one in ((learner.index.keys, after.keys), (learner.index.values, after.values)):
        assert torch.equal(one.nearest(vectors, 1), torch.arange(len(vectors))[:, None])


def test_few_classes_are_all_scored():
    learner = paper(2, 3)
    assert learner.nearby is None
    assert matched(learner, near(learner, images=6))[1].columns is None
