"""Lines about predictions: the same facts for people, JSON and CSV."""

from __future__ import annotations

import csv
import io

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer.learner import Learner
from protosteer.photos.rejection import Rejection
from protosteer.report.predictions import csv_header, lines
from protosteer.settings import Settings

ODD = 'a "b", c.png'


@pytest.fixture(scope="module")
def learner() -> Learner:
    learner = Learner(tiny_backbone(), Settings(prompts=False, centroids=2))
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    learner.add_class("cat", easy_task(["cat"], per_class=5)[0])
    return learner


def told(learner: Learner, top: int = 2, explain: bool = False, rejection: Rejection | None = None):
    prediction = learner.predict(easy_task(["bee", "cat"], per_class=1, seed=40)[0])
    return prediction, list(lines([ODD, "b.png"], prediction, learner.index, top, rejection, explain))


def test_top_is_ranked_and_never_longer_than_there_are_classes(learner):
    prediction, (first, _) = told(learner, top=10)
    assert [other["label"] for other in first.top] == [
        learner.classes[i] for i in prediction.scores[0].argsort(descending=True)
    ]
    assert first.label == first.top[0]["label"] == "bee" and first.task == "spring"
    assert first.probability == first.top[0]["probability"]


def test_csv_has_as_many_fields_as_its_header_and_keeps_odd_paths(learner):
    _, rows = told(learner, top=2, explain=True)
    text = "\n".join([csv_header(2, True), *(row.as_csv() for row in rows)])
    table = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in table} == {len(table[0])} and table[1][0] == ODD


def test_explanations_name_the_centroid_that_won(learner):
    prediction, (first, _) = told(learner, explain=True)
    index = learner.index
    own = index.values[index.value_classes == learner.classes.index("bee")]
    similarities = torch.nn.functional.normalize(prediction.embeddings[:1], dim=1) @ own.T
    explained = first.explained
    assert explained["centroid"] == int(similarities.argmax()) + 1 and explained["centroids"] == len(own)
    assert explained["centroid_similarity"] == pytest.approx(first.similarity, abs=1e-6)
    assert explained["margin"] == pytest.approx(first.similarity - first.top[1]["similarity"], abs=1e-6)
    assert "retrieved: spring" in first.as_text() and "runner-up: " in first.as_text()


def test_unknown_is_said_first(learner):
    _, rows = told(learner, rejection=Rejection(learner.memory, 0.99))
    unknown = [row for row in rows if row.unknown]
    assert unknown and all(": unknown, nearest to " in row.as_text() for row in unknown)
    assert all(row.as_json()["unknown"] is True for row in unknown)


def test_a_model_of_one_class_has_no_runner_up():
    learner = Learner(tiny_backbone(), Settings(prompts=False, centroids=2))
    learner.learn(easy_task(["ant"]))
    prediction = learner.predict(easy_task(["ant"], per_class=1)[0])
    (line,) = lines(["a.png"], prediction, learner.index, 3, None, True)
    assert line.explained["runner_up"] is None and "no other class is known" in line.as_text()
