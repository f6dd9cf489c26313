"""Candidates of very many classes against all of them, on sets small enough for both."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from many_toys import cloud, many, near
from protosteer.evidence import class_statistics as spaces
from protosteer.evidence.scorer import Coarse
from protosteer.learner import Learner
from protosteer.model.class_table import Bulk
from protosteer.paper.inference import Matches
from protosteer.prediction import Prediction
from protosteer.search import candidates as shortlisting
from protosteer.search import ivf as searching
from protosteer.search.ivf import Everywhere, Lists, Partition, digests

IMAGES = 40


@pytest.fixture
def small(monkeypatch):
    """What is for very many classes, for a few hundred."""
    monkeypatch.setattr(shortlisting, "FROM", 100)
    monkeypatch.setattr(searching, "LISTS_FROM", 100)
    monkeypatch.setattr(searching, "_PER_LIST", 20)  # ten lists
    monkeypatch.setattr(searching, "PROBED", (5, 5))


def matched(learner: Learner, seen: torch.Tensor) -> tuple[Matches, Matches]:
    """Among all classes, and among candidates."""

    def embed(rows: torch.Tensor, tasks: torch.Tensor | None) -> torch.Tensor:
        return seen[rows] if tasks is None else seen[rows] + 0.1 + 0.05 * (tasks[:, None] % 3)

    assert learner.fusion and learner.shortlist
    return learner.match(embed, len(seen)), learner.match(embed, len(seen), every=False)


def test_candidates_are_scored_as_among_all_classes(small, monkeypatch):
    monkeypatch.setattr(searching, "available", lambda: False)
    learner = many()
    everything, some = matched(learner, near(learner))
    assert some.columns is not None and some.columns.shape == (IMAGES, shortlisting.CANDIDATES)
    assert all(len(set(row)) == len(row) for row in some.columns.tolist())
    assert torch.equal(everything.candidates, some.candidates) and everything.candidates.any()
    untouched = ~everything.candidates.any(dim=1)
    expected = everything.scores.gather(1, some.columns)
    assert torch.allclose(some.scores, expected, atol=1e-4)
    assert torch.allclose(some.similarities, everything.similarities.gather(1, some.columns), atol=1e-5)
    assert torch.equal(some.passes, everything.passes) and torch.equal(some.winners, everything.winners)
    # The sample holds every class, so that the rest is known exactly.
    dense, sparse = (Prediction.build(learner.index, m, 1.0) for m in (everything, some))
    chosen = dense.probabilities.gather(1, some.columns)
    assert untouched.any() and torch.allclose(sparse.probabilities[untouched], chosen[untouched], atol=1e-5)
    assert dense.labels == sparse.labels and dense.tasks == sparse.tasks
    assert torch.allclose(dense.energy[untouched], sparse.energy[untouched], atol=1e-4)
    ranked = [[name for name, *_ in row] for row in sparse.ranked(3)]
    assert ranked == [[name for name, *_ in row] for row in dense.ranked(3)]
    assert all(sparse.column(i, row[0]) == int(sparse.scores[i].argmax()) for i, row in enumerate(ranked))


def test_a_sample_of_the_classes_stands_for_the_rest(small, monkeypatch):
    monkeypatch.setattr(searching, "available", lambda: False)
    monkeypatch.setattr(shortlisting, "SAMPLE", 80)
    learner = many()
    seen = near(learner, spread=3.0)
    assert learner.fusion
    everything = learner.fusion.match(lambda rows, _: seen[rows], len(seen), fine=False)
    some = learner.fusion.match(lambda rows, _: seen[rows], len(seen), False, learner.shortlist)
    others = everything.scores.scatter(1, some.columns, -torch.inf).logsumexp(dim=1)
    assert float((some.rest - others).abs().max()) < 0.5
    assert float((some.rest - others).mean().abs()) < 0.1


def test_lists_find_nearly_always_what_looking_everywhere_finds(small):
    pytest.importorskip("faiss", reason="faiss is not installed")
    learner = many()
    assert isinstance(learner.shortlist.search, Lists)
    everything, some = matched(learner, near(learner))
    best = everything.scores.argmax(dim=1, keepdim=True)
    found = (some.columns == best).any(dim=1)
    assert float(found.float().mean()) >= 0.95
    mine = some.columns.gather(1, some.scores.argmax(dim=1, keepdim=True))
    assert torch.equal(mine[found], best[found])


def test_lists_looked_into_to_the_last_miss_nothing(small, monkeypatch):
    pytest.importorskip("faiss", reason="faiss is not installed")
    vectors = F.normalize(torch.randn(500, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    queries = vectors[:50] + 0.01
    monkeypatch.setattr(searching, "PROBED", (500, 500))
    lists = Lists(vectors, Partition.fit([str(i) for i in range(500)], vectors))
    assert torch.equal(lists.nearest(queries, 1), Everywhere(vectors).nearest(queries, 1))
    monkeypatch.setattr(searching, "PROBED", (1, 1))
    few = Lists(vectors, Partition.fit([str(i) for i in range(500)], vectors)).nearest(queries, 64)
    assert all(len({*row}) == 64 and min(row) >= 0 and max(row) < 500 for row in few.tolist())


def test_classes_that_come_and_go_keep_the_lists_in_step(small):
    pytest.importorskip("faiss", reason="faiss is not installed")
    learner = many()
    before = learner.shortlist.partition
    learner.forget("class-3-4")
    one = (cloud("new", 12345),)
    learner.memory.add(dataclasses.replace(learner.memory.tasks[0], name="new", classes=one))
    after = learner.shortlist.partition
    assert after.centroids is before.centroids and after.changed == 2
    assert int(digests(["new"])) in after.digests and int(digests(["class-3-4"])) not in after.digests
    vectors = learner.shortlist.whitened.units(learner.fusion.views[0].coarse.space.means)
    fresh = Lists(vectors, Partition.fit(sorted(learner.classes), vectors))
    own = torch.arange(0, len(vectors), 10)[:, None]
    for one_search in (fresh, learner.shortlist.search):
        assert torch.equal(one_search.nearest(vectors[::10], 1), own)


def test_lists_are_made_anew_when_many_classes_have_changed(small):
    pytest.importorskip("faiss", reason="faiss is not installed")
    vectors = F.normalize(torch.randn(500, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    old = Partition.fit([str(i) for i in range(500)], vectors)
    names = [str(i) for i in range(100, 600)]
    new = old.following(names, vectors)
    assert (
        new.centroids is not old.centroids and new.changed == 0 and torch.equal(new.digests, digests(names))
    )


def test_few_classes_have_no_shortlist():
    learner = many(2, 3)
    assert learner.shortlist is None


def test_the_covariance_of_some_classes_is_nearly_that_of_all(monkeypatch):
    """Points are drawn about their class means with a covariance that is known."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0.5, 2.0, 8)
    points = (
        torch.randn(2000, 1, 8, generator=generator) + torch.randn(2000, 5, 8, generator=generator) * scales
    )
    lengths = torch.full((2000,), 5)
    bulk = Bulk(points.flatten(0, 1), torch.ones(10_000, dtype=torch.int64), torch.zeros(2000, 8), lengths)
    monkeypatch.setattr(spaces, "COVARIANCE", 5_000)
    coarse = Coarse(bulk)
    assert coarse.space.freedom == 4 * 1000
    expected = torch.diag(scales.double() ** 2)
    found = coarse.space.scatter / coarse.space.freedom
    assert float((found - expected).abs().max()) < 0.25
