"""The routes over HTTP: what is answered, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from fastapi.testclient import TestClient

import protosteer.serve
from protosteer.errors import SettingsError
from protosteer.learner import Learner
from protosteer.method.inference import Prediction
from protosteer.photos.rejection import threshold
from protosteer.serve import answers
from protosteer.serve.app import create_app
from protosteer.serve.limits import Limits
from protosteer.serve.projection import Projection
from protosteer.settings import Settings
from serve_toys import BEARER, form, pictures, service, taught


@pytest.fixture(scope="module")
def learner() -> Learner:
    """With one class of a few images, whose left-out similarities calibrate the model."""
    learner = taught()
    learner.add_class("few", pictures("few", 6))
    return learner


@pytest.fixture
def client(tmp_path, learner):
    with TestClient(service(tmp_path, learner)) as client:
        yield client


# Prediction


def test_predictions_equal_those_of_the_learner(client, learner):
    pixels = torch.cat([pictures(name, 3) for name in ("ant", "dog", "few")])
    expected = learner.predict(pixels)
    served = client.post("/predict?top=3&reject=0.2", files=form(pixels)).json()["predictions"]
    assert [p["name"] for p in served] == [f"picture {i}.png" for i in range(9)]
    assert [p["label"] for p in served] == expected.labels
    assert [p["task"] for p in served] == expected.tasks
    assert [p["candidates"] for p in served] == expected.candidates
    best = expected.scores.amax(dim=1)
    torch.testing.assert_close(torch.tensor([p["similarity"] for p in served]), best)
    torch.testing.assert_close(torch.tensor([p["energy"] for p in served]), expected.energy)
    places = Projection.fit(learner.memory).place(expected.embeddings)
    torch.testing.assert_close(torch.tensor([p["position"] for p in served]), torch.tensor(places))
    limit = threshold(learner, 0.2)
    assert [p["unknown"] for p in served] == (best < limit).tolist()
    assert [p["passes"] for p in served] == expected.passes.tolist()
    for row, prediction in enumerate(served):
        ranked = expected.scores[row].argsort(descending=True)[:3].tolist()
        assert [t["label"] for t in prediction["top"]] == [expected.classes[c] for c in ranked]
        assert [t["probability"] for t in prediction["top"]] == pytest.approx(
            expected.probabilities[row, ranked].tolist()
        )
        assert prediction["top"][0]["similarity"] == prediction["similarity"]
        assert prediction["top"][0]["task"] == prediction["task"]


def test_answers_have_the_shapes_that_openapi_tells(client):
    body = client.post("/predict", files=form(pictures("ant", 2))).json()
    shape = answers.Predictions.model_validate(body, extra="forbid")
    assert shape.model_dump(mode="json") == {"predictions": [dict(p) for p in body["predictions"]]}
    openapi = client.get("/openapi.json").json()
    assert "HTTPValidationError" not in openapi["components"]["schemas"]  # every error has our own shape
    paths = openapi["paths"]
    assert set(paths) >= {"/predict", "/classes", "/classes/{name}", "/model", "/map", "/jobs/{id}"}
    assert "multipart/form-data" in paths["/predict"]["post"]["requestBody"]["content"]
    assert paths["/classes/{name}"]["delete"]["security"] == [{"HTTPBearer": []}]
    refusal = paths["/predict"]["post"]["responses"]["422"]["content"]["application/json"]["schema"]
    assert refusal == {"$ref": "#/components/schemas/Error"}


def test_whether_an_image_is_unknown_is_null_where_the_model_cannot_tell(tmp_path):
    with TestClient(service(tmp_path, taught(), teach=False)) as client:
        (answer,) = client.post("/predict", files=form(pictures("ant", 1))).json()["predictions"]
        assert answer["unknown"] is None and client.get("/model").json()["calibrated"] is False


def test_by_evidence_probabilities_are_calibrated_and_nothing_need_be_held_out(tmp_path):
    learner = taught(Settings.preset("instant"))
    pixels = torch.cat([pictures(name, 4) for name in ("ant", "dog", "yak")])
    expected = learner.predict(pixels)
    with TestClient(service(tmp_path, learner, teach=False)) as client:
        served = client.post("/predict?reject=0.2", files=form(pixels)).json()["predictions"]
        model, classes = client.get("/model").json(), client.get("/classes").json()["classes"]
        places = {c["name"]: (c["x"], c["y"]) for c in client.get("/map").json()["classes"]}
    assert [p["label"] for p in served] == expected.labels
    shares = torch.tensor([p["probability"] for p in served])
    torch.testing.assert_close(shares, expected.probabilities.amax(dim=1))
    greatest = expected.similarities.amax(dim=1)
    assert [p["unknown"] for p in served] == (greatest < threshold(learner, 0.2)).tolist()
    assert all(p["unknown"] for p in served[8:]) and not all(p["unknown"] for p in served[:8])
    assert {p["passes"] for p in served} == {1} and "greatest" not in served[0]
    assert model["calibrated"] and model["rule"] == "evidence" and not model["trainable"]
    assert {c["centroids"] for c in classes} == {8}
    for answer in served[:8]:
        assert math.dist(answer["position"], places[answer["label"]]) == min(
            math.dist(answer["position"], place) for place in places.values()
        )


def test_what_is_unknown_is_decided_by_the_class_that_is_most_similar(tmp_path, monkeypatch):
    learner, build = taught(Settings.preset("instant")), Prediction.build

    def spoilt(*given):
        prediction = build(*given)
        return dataclasses.replace(prediction, **{field: getattr(prediction, field) * math.nan})

    monkeypatch.setattr(Prediction, "build", spoilt)
    with TestClient(service(tmp_path, learner, teach=False)) as client:
        answer = client.post("/predict", files=form(pictures("ant", 2)))
    assert answer.status_code == 500 and list(answer.json()) == ["detail"]
    assert "not finite" in answer.json()["detail"]


def test_a_full_queue_refuses_before_anything_is_decoded(tmp_path, learner, monkeypatch):
    decoded = []
    app = service(tmp_path, learner, limits=Limits(images=2, queue=2, batch=2))
    state = app.state.service
    entered, go_on = threading.Event(), threading.Event()
    predict = state.store.current.predict

    def slow(pixels, top):
        entered.set()
        assert go_on.wait(10)
        return predict(pixels, top)

    monkeypatch.setattr(state.store.current, "predict", slow)
    canvas = state.uploads.canvas
    monkeypatch.setattr(state.uploads, "canvas", lambda image: decoded.append(image) or canvas(image))
    with TestClient(app) as client, ThreadPoolExecutor(3) as pool:

        def ask():
            return client.post("/predict", files=form(pictures("ant", 2)))

        first = pool.submit(ask)
        assert entered.wait(10)
        second = pool.submit(ask)
        while state.batcher.length < 2:
            assert not second.done()
        refused = ask()
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["detail"] == "2 images are waiting and 2 may; try again later"
        go_on.set()
        assert first.result().status_code == second.result().status_code == 200
        assert len(decoded) == 4
        assert ask().status_code == 200


def test_an_error_inside_gives_one_line_and_is_logged(client, monkeypatch, caplog):
    state = client.app.state.service
    monkeypatch.setattr(state.store.current, "predict", lambda pixels, top: 1 / 0)
    answer = client.post("/predict", files=form(pictures("ant", 1)))
    assert answer.status_code == 500
    assert answer.json() == {"detail": "the service failed (ZeroDivisionError); its log says more"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "POST /predict failed" in caplog.text


def test_bad_setups_are_refused(tmp_path, learner):
    learner.save(tmp_path / "m.protosteer")
    for options, words in (
        ({"allow_teach": True}, "needs a token"),
        ({"allow_teach": True, "token": ""}, "needs a token"),
        ({"reject": 1.0}, "reject = 1.0"),
    ):
        with pytest.raises(SettingsError, match=words):
            create_app(learner, tmp_path / "m.protosteer", **options)
    with pytest.raises(SettingsError, match="queue = 5"):
        Limits(images=6, queue=5)
    with pytest.raises(SettingsError, match="pixels = 0"):
        Limits(pixels=0)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ImportError, match=r"needs uvicorn: pip install 'protosteer\[serve\]'"):
        importlib.reload(protosteer.serve)
    monkeypatch.undo()
    importlib.reload(protosteer.serve)


def test_when_the_service_has_stopped_requests_are_refused(tmp_path, learner):
    app = service(tmp_path, learner)
    with TestClient(app) as client:
        app.state.service.stop()
        answer = client.post("/predict", files=form(pictures("ant", 1)))
        assert answer.status_code == 503 and "stopping" in answer.json()["detail"]
        answer = client.post("/classes/new?train=true", files=form(pictures("new")), headers=BEARER)
        assert answer.status_code == 503
