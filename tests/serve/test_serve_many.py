"""The service of a model whose classes are so many that only candidates are scored, with the threshold lowered."""

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from fastapi.testclient import TestClient

from many_toys import many
from protosteer.rules import RULES, EvidenceRule
from protosteer.search.candidates import CandidateOptions
from protosteer.workflows import model_summary
from serve_toys import BEARER, form, pictures, service


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RULES, "evidence", EvidenceRule(CandidateOptions(min_classes=100)))
    monkeypatch.setattr(model_summary, "PAIRED", 100)
    with TestClient(service(tmp_path, many())) as found:
        yield found


def test_candidates_are_answered_as_all_classes_would_be(client):
    answered = client.post("/predict?top=100", files=form(pictures("ant"))).json()["predictions"]
    learner = many()
    pixels = pictures("ant")
    tokens = learner.backbone.embed_pixels(pixels)
    read = learner.reader.classifier
    expected = read.match(lambda rows, _: tokens[rows], len(pixels), task_prompts=False).scores
    first = [learner.classes[i] for i in expected.argmax(dim=1).tolist()]
    sure = [row["passes"] == 1 for row in answered]  # no prompt had a say
    assert any(sure) and all(row["label"] == name for row, name, one in zip(answered, first, sure, strict=True) if one)
    for row in answered:
        assert len(row["top"]) == len({one["label"] for one in row["top"]}) == CandidateOptions().candidates
        assert 0 < sum(one["probability"] for one in row["top"]) < 1  # the rest is that of all others


def test_what_is_told_of_the_model_takes_no_pairs_of_classes(client):
    told = client.get("/model").json()
    assert told["totals"]["classes"] == 200 and told["confusable"] is None
    assert len(client.get("/classes").json()["classes"]) == len(client.get("/map").json()["classes"]) == 200


def test_a_class_comes_and_goes_among_very_many(client):
    examples = pictures("bee", 5)
    assert client.post("/classes/bee", headers=BEARER, files=form(examples)).status_code == 201
    again = client.post("/predict", files=form(examples)).json()["predictions"]
    assert {row["label"] for row in again} == {"bee"}
    assert client.delete("/classes/bee", headers=BEARER).json()["exact"]
    gone = client.post("/predict", files=form(examples)).json()["predictions"]
    assert all(row["label"] != "bee" for row in gone)
