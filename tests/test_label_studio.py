"""The backend for Label Studio, asked as Label Studio asks, with a real service behind it.

Requests have the fields that Label Studio 1.13 sends (label_studio/ml/api_connector.py, webhooks/models.py).
"""

import http.server
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from fastapi.testclient import TestClient

from conftest import REPOSITORY
from protosteer.settings import Settings
from serve_toys import TOKEN, encoded, pictures, served, service, taught

pytestmark = pytest.mark.slow

KEY = "a key of Label Studio"
CONFIG = """<View>
  <Image name="photo" value="$image"/>
  <Header value="What is it?"/>
  <Choices name="animal" toName="photo" choice="single" showInLine="true">
    <Choice value="ant"/><Choice value="bee"/><Choice value="Feline" alias="cat"/><Choice value="yak"/>
  </Choices>
</View>"""
UID = "7.1755000000"


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    path = REPOSITORY / "deploy" / "label_studio" / "backend.py"
    spec = importlib.util.spec_from_file_location("label_studio_backend", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def studio() -> Iterator[tuple[str, list[str]]]:
    """Pictures at /data/upload/7/CLASS-NUMBER.png for whoever has the key, and who asked."""
    asked: list[str] = []

    class Pictures(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            name, _, number = Path(self.path).stem.partition("-")
            if self.path == "/data/away":
                self.send_response(302)
                self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
                return
            allowed = self.headers["Authorization"] == f"Token {KEY}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            if allowed:
                self.wfile.write(b"no picture" if name == "bad" else encoded(pictures(name, 8)[int(number)]))

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(backend, studio, tmp_path) -> Iterator[TestClient]:
    app = service(tmp_path, taught(Settings.preset("instant")), token=TOKEN)
    with served(app) as (port, _):
        behind = backend.Service(f"http://127.0.0.1:{port}", TOKEN)
        made = backend.create_app(backend.Backend(behind, backend.LabelStudio(studio[0], KEY)))
        with TestClient(made, base_url="http://localhost") as client:
            yield client


def task(id: int, address: str) -> dict[str, Any]:
    return {"id": id, "data": {"image": address}, "meta": {}, "project": 7, "is_labeled": False, "overlap": 1}


def upload(name: str, number: int = 0) -> str:
    return f"/data/upload/7/{name}-{number}.png"


def asked_to_predict(*tasks: dict[str, Any]) -> dict[str, Any]:
    params = {"login": None, "password": None, "context": None}
    return {"tasks": list(tasks), "project": UID, "label_config": CONFIG, "params": params}


def annotation(*labels: str, **more: Any) -> dict[str, Any]:
    value = {"choices": list(labels)}
    region = {"value": value, "id": "WArqkkifYE", "from_name": "animal", "to_name": "photo", "type": "choices"}
    return {"id": 17, "result": [region], "was_cancelled": False, "task": 3, "lead_time": 3.1, **more}


def event(action: str, made: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    project = {"id": 7, "title": "Animals", "label_config": CONFIG}
    return {"action": action, "annotation": made, "task": about, "project": project}


def test_it_is_there_and_has_a_version(client):
    assert client.get("/health").json() == client.get("/").json()
    assert client.get("/health").json()["status"] == "UP"
    asked = {"project": UID, "schema": CONFIG, "hostname": "http://x", "access_token": "y", "extra_params": None}
    version = client.post("/setup", json=asked).json()["model_version"]
    assert version.startswith("protosteer-")
    refused = client.post("/setup", json={**asked, "schema": "<View><Text name='t' value='$t'/></View>"})
    assert refused.status_code == 422 and "needs <Image" in refused.json()["detail"]
    assert client.post("/setup", json={**asked, "schema": "<View>"}).status_code == 422


def test_tasks_get_choices_with_scores_in_their_order(client):
    tasks = [task(1, upload("bee", 1)), task(2, upload("bad")), task(3, upload("ant", 2)), task(4, upload("cat"))]
    results = client.post("/predict", json=asked_to_predict(*tasks)).json()["results"]
    assert len(results) == 4 and len({one["model_version"] for one in results}) == 1
    named = [[region["value"]["choices"] for region in one["result"]] for one in results]
    assert named == [[["bee"]], [], [["ant"]], [["cat"]]]
    region = results[0]["result"][0]
    assert (region["from_name"], region["to_name"], region["type"]) == ("animal", "photo", "choices")
    assert all(0.5 < one["score"] <= 1 for one in results[::2]) and results[1]["score"] == 0


def test_only_classes_that_can_be_chosen_are_proposed(client):
    (one,) = client.post("/predict", json=asked_to_predict(task(1, upload("dog")))).json()["results"]
    assert [region["value"]["choices"] for region in one["result"]] != [["dog"]]
    assert one["score"] < 0.5


def test_an_annotation_is_learned_at_once(client):
    about = task(3, upload("yak", 4))
    before = client.post("/predict", json=asked_to_predict(about)).json()["results"][0]
    told = client.post("/webhook", json=event("ANNOTATION_CREATED", annotation("yak"), about))
    assert told.status_code == 201 and told.json()["result"] == ["yak: new class"]
    after = client.post("/predict", json=asked_to_predict(about)).json()["results"][0]
    assert after["result"][0]["value"]["choices"] == ["yak"]
    assert before["model_version"] != after["model_version"]  # or Label Studio would not ask again
    again = client.post("/webhook", json=event("ANNOTATION_UPDATED", annotation("yak"), about))
    assert again.json()["result"] == ["yak: known so already"]
    other = client.post("/webhook", json=event("ANNOTATION_UPDATED", annotation("ant"), about))
    assert other.json()["result"] == ["ant: corrected from yak"]
    now = client.post("/predict", json=asked_to_predict(about)).json()["results"][0]
    assert now["model_version"] not in (before["model_version"], after["model_version"])


@pytest.mark.parametrize(
    ("action", "made"),
    [
        ("ANNOTATION_CREATED", annotation("yak", was_cancelled=True)),
        ("ANNOTATION_CREATED", annotation("yak", "ant")),
        ("ANNOTATION_CREATED", annotation("yak", result=[])),
        ("ANNOTATIONS_DELETED", annotation("yak")),
        ("START_TRAINING", annotation("yak")),
    ],
)
def test_what_names_no_class_teaches_nothing(client, studio, action, made):
    answer = client.post("/webhook", json=event(action, made, task(3, upload("yak"))))
    assert answer.status_code == 201 and answer.json()["result"] == [] and studio[1] == []


def test_older_ones_send_all_annotations_to_train(client):
    tasks = [{**task(n, upload("yak", n)), "annotations": [annotation("yak")]} for n in (1, 2)]
    params = {"login": None, "password": None}
    asked = {"annotations": tasks, "project": UID, "label_config": CONFIG, "params": params}
    told = client.post("/train", json=asked)
    assert told.status_code == 201 and told.json()["result"][0] == "yak: new class"


@pytest.mark.parametrize(
    "address",
    ["http://169.254.169.254/latest/meta-data", "//elsewhere.example/x.png", "file:///etc/passwd", "s3://b/x"],
)
def test_pictures_of_others_are_not_fetched(client, studio, address):
    made = event("ANNOTATION_CREATED", annotation("yak"), task(3, address))
    answer = client.post("/webhook", json=made)
    assert answer.status_code == 422 and "are not fetched" in answer.json()["detail"] and studio[1] == []


def test_the_key_goes_to_label_studio_alone_and_redirections_are_not_followed(backend, studio, monkeypatch):
    ours = backend.LabelStudio("http://studio.example", KEY, frozenset(["127.0.0.1"]))
    with pytest.raises(backend.Trouble, match="gives 401"):  # the other host callbacks no key
        ours.picture(f"{studio[0]}{upload('ant')}")
    with pytest.raises(backend.Trouble, match="gives 302"):
        backend.LabelStudio(studio[0], KEY).picture("/data/away")
    monkeypatch.setattr(backend, "PICTURE_BYTES", 10)
    with pytest.raises(backend.Trouble, match="is larger than 10 bytes"):
        backend.LabelStudio(studio[0], KEY).picture(upload("ant"))


def test_a_service_that_is_away_is_told_in_one_line(backend, studio):
    made = backend.create_app(
        backend.Backend(backend.Service("http://127.0.0.1:1", None), backend.LabelStudio(studio[0], KEY))
    )
    with TestClient(made, base_url="http://localhost") as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/predict", json=asked_to_predict(task(1, upload("ant"))))
    assert answer.status_code == 503 and "does not answer" in answer.json()["detail"]


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:{port}\\@pictures.example/x",
        "http://pictures.example@127.0.0.1:{port}/x",
        "http://127.0.0.1:{port}\t/x",
        "http://[127.0.0.1:{port}/x",
        "http://127.0.0.1:{port}/\ud800",
    ],
)
def test_an_address_has_one_host_for_all_parsers(backend, studio, address):
    port = studio[0].rpartition(":")[2]
    ours = backend.LabelStudio("http://studio.example", KEY, frozenset(["pictures.example"]))
    with pytest.raises(backend.Trouble):
        ours.picture(address.replace("{port}", port))
    assert studio[1] == []


def test_other_hosts_and_a_wrong_secret_are_rejected(backend):
    behind = backend.Backend(backend.Service("http://127.0.0.1:1", None), backend.LabelStudio("http://x", None))
    made = backend.create_app(behind, ["studio-backend"], secret="word")
    with TestClient(made, base_url="http://localhost") as client:
        skipped = {"action": "PROJECT_UPDATED"}
        assert client.get("/health").status_code == client.get("/word/health").status_code == 200
        assert client.post("/word/webhook", json=skipped).status_code == 201
        for route in ("/webhook", "/other/webhook", "/%C3%A4/webhook", "/webhook/webhook"):
            assert client.post(route, json=skipped).status_code == 404
        for host, status in {"evil.example": 421, "studio-backend:9090": 201, "127.0.0.1:9090": 201}.items():
            answer = client.post("/word/webhook", json=skipped, headers={"Host": host})
            assert answer.status_code == status


ODD = [5, "\ud800", [5], [[]], {"x": 5}, True]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_json_of_other_shapes_is_rejected_without_a_crash(backend, odd):
    service = backend.Service("http://127.0.0.1:1", None)
    object.__setattr__(service, "version", lambda: "v")
    object.__setattr__(service, "learn", lambda label, picture: "learned")
    studio = backend.LabelStudio("http://127.0.0.1:1", None)
    made = event("ANNOTATION_CREATED", annotation("yak"), task(3, upload("yak")))
    requests = [("/webhook", odd), ("/predict", odd), ("/train", odd), ("/setup", {"schema": odd})]
    requests += [("/webhook", {**made, key: odd}) for key in ("annotation", "task", "project", "action")]
    requests.append(("/webhook", {**made, "project": {"label_config": odd}}))
    requests.append(("/webhook", {**made, "task": {"id": 1, "data": odd}}))
    requests.append(("/webhook", {**made, "task": {"id": 1, "data": {"image": odd}}}))
    requests.append(("/webhook", {**made, "annotation": annotation("yak", result=odd)}))
    for value in (odd, {"choices": odd}, {"choices": [odd]}):
        region = {"value": value, "from_name": "animal", "type": "choices"}
        requests.append(("/webhook", {**made, "annotation": annotation("yak", result=[region])}))
    requests.append(("/predict", {"label_config": CONFIG, "tasks": odd}))
    requests.append(("/predict", {"label_config": CONFIG, "tasks": [{"id": odd, "data": odd}]}))
    requests.append(("/train", {"label_config": CONFIG, "annotations": odd}))
    with TestClient(backend.create_app(backend.Backend(service, studio)), base_url="http://localhost") as client:
        for route, body in requests:
            answer = client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
            assert answer.status_code in (200, 201, 422, 503), (route, body)
