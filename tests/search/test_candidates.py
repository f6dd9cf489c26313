"""Candidates of very many classes against all of them, on sets small enough for both."""

import dataclasses

import pytest
import torch

from conftest import easy_task
from many_toys import many, near
from protosteer.evidence import class_statistics as spaces
from protosteer.evidence.matches import ClassifierMatches
from protosteer.evidence.scorer import CoarseScorer
from protosteer.evidence.summary_table import SummaryTable
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.rules import RULES, EvidenceReader, EvidenceRule
from protosteer.search.candidates import CandidateOptions
from protosteer.search.ivf import IVFOptions, IVFSearch
from protosteer.workflows.prediction_table import prediction_rows

IMAGES = 40
# What is for very many classes, for a few hundred: by an exact search, and by ten lists.
EXACT = CandidateOptions(min_classes=100)
LISTS = CandidateOptions(min_classes=100, ivf=IVFOptions(min_vectors=100, vectors_per_list=20, nprobe_range=(5, 5)))


def matched(learner: Learner, seen: torch.Tensor) -> tuple[ClassifierMatches, ClassifierMatches]:
    """Among all classes, and among candidates."""

    def embed(rows: torch.Tensor, tasks: torch.Tensor | None) -> torch.Tensor:
        return seen[rows] if tasks is None else seen[rows] + 0.1 + 0.05 * (tasks[:, None] % 3)

    reader = learner.reader
    return reader.match(embed, len(seen)), reader.match(embed, len(seen), exhaustive=False)


def test_candidates_are_scored_as_among_all_classes(monkeypatch):
    monkeypatch.setitem(RULES, "evidence", EvidenceRule(EXACT))
    learner = many()
    everything, some = matched(learner, near(learner))
    assert some.class_ids is not None and some.class_ids.shape == (IMAGES, EXACT.candidates)
    assert all(len(set(row)) == len(row) for row in some.class_ids.tolist())
    assert torch.equal(everything.candidates, some.candidates) and everything.candidates.any()
    untouched = ~everything.candidates.any(dim=1)
    expected = everything.scores.gather(1, some.class_ids)
    assert torch.allclose(some.scores, expected, atol=1e-4)
    assert torch.allclose(some.similarities, everything.similarities.gather(1, some.class_ids), atol=1e-5)
    assert torch.equal(some.passes, everything.passes) and torch.equal(some.winners, everything.winners)
    # The sample holds every class, so that the rest is known exactly.
    dense, sparse = (Prediction.build(learner.reader.index, m, 1.0) for m in (everything, some))
    chosen = dense.probabilities.gather(1, some.class_ids)
    assert untouched.any() and torch.allclose(sparse.probabilities[untouched], chosen[untouched], atol=1e-5)
    assert dense.labels == sparse.labels and dense.tasks == sparse.tasks
    assert torch.allclose(dense.energy[untouched], sparse.energy[untouched], atol=1e-4)
    ranked = [[name for name, *_ in row] for row in sparse.ranked(3)]
    assert ranked == [[name for name, *_ in row] for row in dense.ranked(3)]
    assert all(sparse.column(i, row[0]) == int(sparse.scores[i].argmax()) for i, row in enumerate(ranked))


def test_a_sample_of_the_classes_stands_for_the_rest():
    learner = many()
    seen = near(learner, spread=3.0)
    read = EvidenceReader(learner.memory, dataclasses.replace(EXACT, sample=80)).classifier
    everything, some = (
        read.match(lambda rows, _: seen[rows], len(seen), exhaustive, task_prompts=False)
        for exhaustive in (True, False)
    )
    others = everything.scores.scatter(1, some.class_ids, -torch.inf).logsumexp(dim=1)
    assert float((some.log_other_mass - others).abs().max()) < 0.5
    assert float((some.log_other_mass - others).mean().abs()) < 0.1


def test_lists_find_nearly_always_what_looking_everywhere_finds(monkeypatch):
    pytest.importorskip("faiss", reason="faiss is not installed")
    monkeypatch.setitem(RULES, "evidence", EvidenceRule(LISTS))
    learner = many()
    assert isinstance(learner.reader.classifier.candidate_search.search, IVFSearch)
    everything, some = matched(learner, near(learner))
    best = everything.scores.argmax(dim=1, keepdim=True)
    found = (some.class_ids == best).any(dim=1)
    assert float(found.float().mean()) >= 0.95
    mine = some.class_ids.gather(1, some.scores.argmax(dim=1, keepdim=True))
    assert torch.equal(mine[found], best[found])


def test_few_classes_are_all_scored():
    learner = many(2, 3)
    assert matched(learner, near(learner, images=6))[1].class_ids is None


def test_the_covariance_of_some_classes_is_nearly_that_of_all(monkeypatch):
    """Points are drawn about their class means with a covariance that is known."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0.5, 2.0, 8)
    points = torch.randn(2000, 1, 8, generator=generator) + torch.randn(2000, 5, 8, generator=generator) * scales
    lengths = torch.full((2000,), 5)
    bulk = SummaryTable(points.flatten(0, 1), torch.ones(10_000, dtype=torch.int64), torch.zeros(2000, 8), lengths)
    monkeypatch.setattr(spaces, "COVARIANCE_PROTOTYPES", 5_000)
    coarse = CoarseScorer(bulk)
    assert coarse.statistics.dof == 4 * 1000
    expected = torch.diag(scales.double() ** 2)
    found = coarse.statistics.scatter / coarse.statistics.dof
    assert float((found - expected).abs().max()) < 0.25


@pytest.mark.parametrize("rule", ["evidence", "paper"])
def test_an_explanation_names_the_second_best_of_very_many_classes(rule, monkeypatch):
    monkeypatch.setitem(RULES, "evidence", EvidenceRule(EXACT))
    learner = many()
    learner.settings = learner.settings.replace(rule=rule)
    prediction = learner.predict(easy_task(["ant", "bee", "cat"])[0])
    assert prediction.scores.shape[1] == (EXACT.candidates if rule == "evidence" else len(learner.classes))
    paths = [str(i) for i in range(len(prediction))]
    rows = prediction_rows(learner, prediction, paths, 3, explain=True)
    for row, ranking in zip(rows, prediction.ranked(2), strict=True):
        assert row.explanation["runner_up"] == ranking[1][0] == row.top[1]["label"]
        assert row.explanation["runner_up_similarity"] == ranking[1][2]
