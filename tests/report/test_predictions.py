"""Lines about predictions: the same facts for people, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer.learner import Learner
from protosteer.report.predictions import as_csv, as_text, csv_header
from protosteer.settings import Settings
from protosteer.workflows.ood import Rejection
from protosteer.workflows.prediction_rows import told

ODD = 'a "b", c.png'


@pytest.fixture(scope="module")
def learner() -> Learner:
    learner = Learner(tiny_backbone(), Settings(prompts=False, centroids=2))
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    learner.add_class("cat", easy_task(["cat"], per_class=5)[0])
    return learner


@pytest.fixture(scope="module")
def by_evidence() -> Learner:
    learner = Learner(tiny_backbone(), Settings.preset("instant"))
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    learner.add_class("cat", easy_task(["cat"], per_class=5)[0])
    return learner


def tell(learner: Learner, top: int = 2, explain: bool = False, rejection: Rejection | None = None):
    prediction = learner.predict(easy_task(["bee", "cat"], per_class=1, seed=40)[0])
    return prediction, list(told([ODD, "b.png"], prediction, learner, top, rejection, explain))


def test_top_is_ranked_and_never_longer_than_there_are_classes(learner):
    prediction, (first, _) = tell(learner, top=10)
    assert [other["label"] for other in first["top"]] == [
        learner.classes[i] for i in prediction.scores[0].argsort(descending=True)
    ]
    assert first["label"] == first["top"][0]["label"] == "bee" and first["task"] == "spring"
    assert first["probability"] == first["top"][0]["probability"]


def test_csv_has_as_many_fields_as_its_header_and_keeps_odd_paths(learner):
    _, rows = tell(learner, top=2, explain=True)
    text = "\n".join([csv_header(2, True), *map(as_csv, rows)])
    table = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in table} == {len(table[0])} and table[1][0] == ODD


def test_explanations_name_the_centroid_that_won(learner):
    prediction, (first, _) = tell(learner, explain=True)
    index = learner.index
    own = index.values[index.value_classes == learner.classes.index("bee")]
    similarities = torch.nn.functional.normalize(prediction.embeddings[:1], dim=1) @ own.T
    assert first["centroid"] == int(similarities.argmax()) + 1 and first["centroids"] == len(own)
    assert first["centroid_similarity"] == pytest.approx(first["similarity"], abs=1e-6)
    assert first["margin"] == pytest.approx(first["similarity"] - first["top"][1]["similarity"], abs=1e-6)
    assert "retrieved: spring" in as_text(first, False) and "runner-up: " in as_text(first, False)


def test_a_model_of_one_class_has_no_runner_up():
    learner = Learner(tiny_backbone(), Settings(prompts=False, centroids=2))
    learner.learn(easy_task(["ant"]))
    prediction = learner.predict(easy_task(["ant"], per_class=1)[0])
    (row,) = told(["a.png"], prediction, learner, 3, None, True)
    assert row["runner_up"] is None and "no other class is known" in as_text(row, False)
    learner = Learner(tiny_backbone(), Settings.preset("instant"))
    learner.learn(easy_task(["ant"]))
    prediction = learner.predict(easy_task(["ant"], per_class=1)[0])
    (row,) = told(["a.png"], prediction, learner, 3, None, True)
    text = as_text(row, True)
    assert text.startswith("a.png: ant 100.0 %\n") and text.endswith("no other class is known")


def test_by_evidence_probabilities_come_first_and_passes_are_told(by_evidence):
    prediction, (first, _) = tell(by_evidence, explain=True)
    (label, share, similarity), (other, less, unlike) = prediction.ranked(2)[0]
    assert (first["label"], first["probability"], first["similarity"]) == (label, share, similarity)
    assert first["passes"] == 1 and first["candidates"] == []
    assert (first["runner_up"], first["runner_up_probability"], first["runner_up_similarity"]) == (
        other,
        pytest.approx(less),
        pytest.approx(unlike),
    )
    line, why = as_text(first, True).split("\n")
    assert line == f"{ODD}: bee {100 * share:.1f} %  ({other} {100 * less:.1f} %)"
    assert f"similarity {similarity:.3f}; runner-up: {other}, {100 * less:.1f} %" in why


def row(**changes: object) -> dict[str, object]:
    told = {
        "path": "a.png",
        "label": "ant",
        "probability": 0.7,
        "similarity": 0.5,
        "unknown": False,
        "passes": 1,
    }
    told |= {"top": [], "candidates": [], "runner_up": "bee", "runner_up_probability": 0.2}
    return told | {"runner_up_similarity": 0.4} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"probability": 0.8}, "sure after one pass, no task's prompt was needed; "),
        ({}, "    one pass, no further prompt to try; "),
        ({"passes": 2}, "2 passes, with and without the prompt for all classes; "),
        ({"passes": 4, "candidates": ["may", "june"]}, "4 passes, prompts tried: may, june; "),
        ({"candidates": ["may"]}, "1 pass, prompts tried: may; "),
    ],
)
def test_by_evidence_an_explanation_says_what_was_tried(changes, words):
    assert words in as_text(row(**changes), True)


def test_what_is_unknown_is_decided_by_the_greatest_similarity_of_any_class(by_evidence):
    prediction = by_evidence.predict(easy_task(["bee"], per_class=1, seed=40)[0])
    most = float(prediction.similarities.max())
    apart = dataclasses.replace(prediction, similarities=prediction.similarities.roll(1, dims=1))
    rejection = Rejection(by_evidence, 0.05)
    for limit, unknown in ((most + 1e-4, True), (most - 1e-4, False)):
        rejection.threshold = limit
        (told_of,) = told(["a.png"], apart, by_evidence, 2, rejection, False)
        assert told_of["unknown"] is unknown and told_of["similarity"] < most
    rejection.threshold = 2.0
    (told_of,) = told(["a.png"], prediction, by_evidence, 1, rejection, False)
    text = as_text(told_of, True)
    assert text.startswith(f"a.png: unknown, similarity {told_of['similarity']:.3f}; if known, bee ")
