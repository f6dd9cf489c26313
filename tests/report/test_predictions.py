"""Lines about predictions: the same facts for people, JSON and CSV."""

from __future__ import annotations

import csv
import io

import pytest
import torch

from conftest import easy_task, tiny_backbone
from protosteer.learner import Learner
from protosteer.report.predictions import as_csv, as_text, csv_header, told
from protosteer.settings import Settings

ODD = 'a "b", c.png'


@pytest.fixture(scope="module")
def learner() -> Learner:
    learner = Learner(tiny_backbone(), Settings(prompts=False, centroids=2))
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    learner.add_class("cat", easy_task(["cat"], per_class=5)[0])
    return learner


def tell(learner: Learner, top: int = 2, explain: bool = False):
    prediction = learner.predict(easy_task(["bee", "cat"], per_class=1, seed=40)[0])
    return prediction, list(told([ODD, "b.png"], prediction, learner.index, top, None, explain))


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
    assert "retrieved: spring" in as_text(first) and "runner-up: " in as_text(first)


def test_a_model_of_one_class_has_no_runner_up():
    learner = Learner(tiny_backbone(), Settings(prompts=False, centroids=2))
    learner.learn(easy_task(["ant"]))
    prediction = learner.predict(easy_task(["ant"], per_class=1)[0])
    (row,) = told(["a.png"], prediction, learner.index, 3, None, True)
    assert row["runner_up"] is None and "no other class is known" in as_text(row)
