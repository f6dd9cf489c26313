"""The routes over HTTP: what is answered, and what is refused with which words."""

import dataclasses
import gc
import importlib
import logging
import math
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from expect import expect_error

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

import protosteer.serve
from conftest import easy_task
from protosteer.data.transforms import Preprocessing
from protosteer.errors import SettingsError
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.serve import schemas
from protosteer.serve.app import create_app
from protosteer.serve.limits import Limits
from protosteer.serve.projection import Projection
from protosteer.settings import Settings
from protosteer.workflows.ood import threshold
from serve_toys import BEARER, PATIENCE, encoded, form, pictures, service, taught


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
    places = Projection.fit(learner.memory, learner.reader).place(expected.embeddings)
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
    shape = schemas.Predictions.model_validate(body, extra="forbid")
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
    learner, predict = taught(Settings.preset("instant")), Learner.predict

    def turned(self, pixels):
        prediction = predict(self, pixels)
        return dataclasses.replace(prediction, similarities=prediction.similarities.roll(1, dims=1))

    monkeypatch.setattr(Learner, "predict", turned)
    pixels, limit = pictures("ant", 6), threshold(learner, 0.2)
    with TestClient(service(tmp_path, learner, teach=False)) as client:
        served = client.post("/predict?reject=0.2", files=form(pixels)).json()["predictions"]
    greatest = predict(learner, pixels).similarities.amax(dim=1)
    assert [p["unknown"] for p in served] == (greatest < limit).tolist()
    assert any(p["similarity"] < limit and not p["unknown"] for p in served)


def test_every_client_gets_the_answers_for_its_own_images(client, learner):
    names = learner.classes
    pixels, labels = easy_task(names, per_class=24, seed=90)
    expected = dict(zip(range(len(labels)), learner.predict(pixels).labels, strict=True))

    def ask(worker: int) -> bool:
        rows = list(range(worker, len(labels), 12))
        right = True
        while rows:
            some, rows = rows[: 1 + worker % 3], rows[1 + worker % 3 :]
            files = [("images", (str(row), encoded(pixels[row]))) for row in some]
            served = client.post("/predict", files=files).json()["predictions"]
            right &= [(p["name"], p["label"]) for p in served] == [(str(r), expected[r]) for r in some]
        return right

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(12)))
    assert metric(client, "protosteer_images_total") == len(labels)


def test_nothing_keeps_images_after_the_answer(client, learner, monkeypatch):
    references, to_canvas = [], Preprocessing.to_canvas

    def noted(self, image):
        canvas = to_canvas(self, image)
        references.append(weakref.ref(canvas))
        return canvas

    monkeypatch.setattr(Preprocessing, "to_canvas", noted)
    assert client.post("/predict", files=form(pictures("ant", 3))).status_code == 200
    assert client.post("/classes/new", files=form(pictures("new", 3)), headers=BEARER).status_code == 201
    assert len(references) == 6
    gc.collect()
    assert all(reference() is None for reference in references)
    assert "new" not in learner.classes  # the service has its own copy


# Reports


def test_reports(client, learner):
    assert client.get("/healthz").json() == {"status": "ok"}
    classes = client.get("/classes").json()["classes"]
    assert [c["name"] for c in classes] == learner.classes
    assert classes[0] == {
        "name": "ant",
        "task": "ant task",
        "tasks": ["ant task"],
        "images": 8,
        "centroids": 2,
        "thumbnails": 0,
        "checked": 0,
        "right": 0,
        "confused_with": None,
    }
    model = client.get("/model").json()
    assert (model["teaching"], model["reject"], model["calibrated"]) == (True, 0.05, True)
    assert [task["name"] for task in model["tasks"]] == learner.tasks
    drawn = client.get("/map").json()
    assert drawn["method"] == "pca" and drawn["tasks"] == learner.tasks
    assert [c["name"] for c in drawn["classes"]] == learner.classes
    assert all(-1 <= value <= 1 for c in drawn["classes"] for value in (c["x"], c["y"]))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere(client, path):
    answer = client.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert 'http-equiv="Content-Security' not in answer.text  # one policy, not two
    assert "access-control-allow-origin" not in answer.headers
    assert '"https://' not in answer.text and "cdn" not in answer.text.lower()


@pytest.mark.parametrize("path", ["/", "/docs", "/style.css", "/model", "/nowhere", "/classes/%ff"])
def test_every_answer_tells_browsers_to_be_careful(client, path):
    headers = client.get(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert len(headers.get_list("content-security-policy")) == 1
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert (
        headers["permissions-policy"].startswith("camera=(self)") and "microphone=()" in headers["permissions-policy"]
    )


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:1", "[::1]:8000", "192.0.2.7", "shop.example.org:443"],
)
def test_a_service_answers_to_its_names_and_to_addresses(tmp_path, learner, host):
    with TestClient(service(tmp_path, learner, host_names=["Shop.example.org"])) as client:
        assert client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "", "[", "[::1", "[::1].evil.example", "127.0.0.1.evil.example", "a\x1b[2J",
     "localhost.evil.example", "127.1", "0x7f000001"],
)  # fmt: skip
def test_another_name_is_refused_so_that_it_cannot_be_turned_to_us(client, host):
    answer = client.get("/model", headers={"Host": host})
    assert answer.status_code == 421 and list(answer.json()) == ["detail"]
    assert answer.json()["detail"].startswith("unknown host name '")
    assert "host_names=" in answer.json()["detail"] and answer.json()["detail"].isprintable()
    assert 'route="none",status="421"' in client.get("/metrics").text


def test_metrics_count_by_route_and_not_by_path(client):
    client.post("/predict", files=form(pictures("ant", 4)))
    for number in range(5):
        client.get(f"/nowhere/{number}")
        client.get(f"/jobs/{number}")
    client.request("BREW", "/")
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    samples = [(one.name, one.labels, one.value) for family in families for one in family.samples]

    def value(name, **labels):
        (found,) = [number for other, its, number in samples if (other, its) == (f"protosteer_{name}", labels)]
        return found

    assert value("requests_total", model="", method="GET", route="none", status="404") == 5
    assert value("requests_total", model="toy", method="GET", route="/jobs/{id}", status="404") == 5
    assert value("requests_total", model="", method="other", route="/", status="405") == 1
    assert value("images_total", model="toy") == 4
    assert value("batch_images_bucket", model="toy", le="2.0") == 0
    assert value("batch_images_bucket", model="toy", le="4.0") == 1
    assert value("request_seconds_bucket", model="toy", route="/predict", le="+Inf") == 1
    assert value("request_seconds_sum", model="toy", route="/predict") > 0
    assert value("classes", model="toy") == 5 and value("queue_images", model="toy") == 0


def metric(client: TestClient, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f'{name}{{model="toy"}} '))


def test_requests_are_logged_only_if_asked_for(client, caplog):
    client.get("/healthz")
    assert not caplog.records
    with caplog.at_level(logging.INFO, "protosteer.serve"):
        client.get("/jobs/a%0Ab")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "protosteer.serve"]
    assert line.startswith("GET /jobs/a%0Ab 404 ") and line.endswith(" ms")


# Refusals


@pytest.mark.parametrize(
    ("query", "words"),
    [("top=0", "option top = '0'"), ("top=x", "option top = 'x'"), ("reject=1", "option reject = '1'")],
)
def test_bad_options_are_named(client, query, words):
    answer = client.post(f"/predict?{query}", files=form(pictures("ant", 1)))
    assert answer.status_code == 422 and answer.json()["detail"].startswith(words)


def test_a_request_without_images_is_told_how_to_send_them(client):
    for options in ({}, {"data": {"images": "text"}}, {"files": [("other", ("a.png", b"x"))]}):
        answer = client.post("/predict", **options)
        assert answer.status_code == 422 and "'images'" in answer.json()["detail"]


def test_a_bad_image_is_named_and_only_its_own_request_fails(client):
    files = form(pictures("ant", 3))
    files[1] = ("images", ("holiday.jpg", b"not an image"))
    answer = client.post("/predict", files=files)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("holiday.jpg cannot be read as an image")
    assert client.post("/predict", files=form(pictures("ant", 3))).status_code == 200


def test_unknown_routes_and_methods(client):
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/predict", 405)):
        answer = client.request(method, path)
        assert answer.status_code == status and "/docs lists what there is" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/classes/", "/healthz/", "/docs/"])
def test_nothing_is_redirected(client, path):
    answer = client.get(path, follow_redirects=False)
    assert answer.status_code in (404, 405) and "location" not in answer.headers and "detail" in answer.json()


@pytest.mark.parametrize("path", ["/classes/%ff", "/classes/caf%e9", "/jobs/%c3%28", "/%ff"])
def test_an_address_that_is_not_text_is_refused(client, path):
    for method in ("GET", "POST", "DELETE"):
        answer = client.request(method, path, headers=BEARER)
        assert answer.status_code == 400 and "not UTF-8" in answer.json()["detail"]


def test_details_stay_on_one_line_whatever_was_asked_for(client):
    for method, path in (("GET", "/jobs/a%0Ab%1b[2J"), ("GET", "/no%0Awhere"), ("DELETE", "/classes/a%0Ab")):
        answer = client.request(method, path, headers=BEARER)
        assert answer.status_code == 404 and answer.json()["detail"].isprintable()


@pytest.mark.parametrize("field", ["similarities", "scores"])
def test_what_is_not_finite_is_never_an_answer(tmp_path, monkeypatch, field):
    learner, build = taught(Settings.preset("instant")), Prediction.build

    def spoilt(index, matches, temperature):
        damaged = dataclasses.replace(matches, **{field: getattr(matches, field) * math.nan})
        return build(index, damaged, temperature)

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
        assert go_on.wait(PATIENCE)
        return predict(pixels, top)

    monkeypatch.setattr(state.store.current, "predict", slow)
    canvas = state.uploads.canvas
    monkeypatch.setattr(state.uploads, "canvas", lambda image: decoded.append(image) or canvas(image))
    with TestClient(app) as client, ThreadPoolExecutor(3) as pool:

        def ask():
            return client.post("/predict", files=form(pictures("ant", 2)))

        first = pool.submit(ask)
        assert entered.wait(PATIENCE)
        second = pool.submit(ask)
        while state.batcher.length < 2:
            assert not second.done()
        refused = ask()
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["detail"] == "queue full: 2 of 2 images are waiting; retry later"
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
    for options, code in (
        ({"allow_teach": True}, "token-required"),
        ({"allow_teach": True, "token": ""}, "token-required"),
        ({"reject": 1.0}, "bad-reject"),
    ):
        with expect_error(code, SettingsError):
            create_app(learner, tmp_path / "m.protosteer", **options)
    with expect_error("bad-setting", SettingsError):
        Limits(images=6, queue=5)
    with expect_error("bad-setting", SettingsError):
        Limits(pixels=0)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with expect_error("error", ImportError):
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
