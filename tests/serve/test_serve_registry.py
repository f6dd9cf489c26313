"""Several models in one service: each by its name, with its own file, queue and trainings."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from expect import expect_error, run_cli

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from conftest import easy_task, tiny_backbone
from protosteer.backbones import Backbone
from protosteer.cli import main
from protosteer.errors import SettingsError
from protosteer.learner import Learner
from protosteer.serve.app import create_app
from protosteer.serve.limits import Limits
from protosteer.settings import Settings
from serve_toys import BEARER, SPRING, TOKEN, form, pictures, service, taught

pytestmark = pytest.mark.slow

BIRDS = ["kite", "owl", "wren"]


def birds(backbone=None) -> Learner:
    learner = Learner(backbone or tiny_backbone(), Settings.preset("instant"))
    learner.learn(easy_task(BIRDS), name="birds task")
    return learner


def both(folder: Path, **options: object) -> FastAPI:
    """The toy model, and one of birds with a name that an address must encode."""
    learner = birds()
    learner.save(folder / "birds.protosteer")
    others = {'my "birds"': (learner, folder / "birds.protosteer")}
    return service(folder, others=others, **options)


@pytest.fixture
def client(tmp_path):
    with TestClient(both(tmp_path)) as client:
        yield client


NAMED = "/models/my%20%22birds%22"


def known(client: TestClient, prefix: str) -> list[str]:
    return [one["name"] for one in client.get(f"{prefix}/classes").json()["classes"]]


def test_models_are_listed_in_their_order(client):
    assert client.get("/models").json()["models"] == [
        {"name": "toy", "file": "toy.protosteer", "backbone": "tiny", "classes": 4, "tasks": 2},
        {"name": 'my "birds"', "file": "birds.protosteer", "backbone": "tiny", "classes": 3, "tasks": 1},
    ]


def test_every_model_answers_by_its_name_and_the_first_without(client):
    assert known(client, NAMED) == BIRDS and known(client, "/models/toy") == known(client, "")
    assert client.get(f"{NAMED}/model").json()["name"] == 'my "birds"'
    assert {place["name"] for place in client.get(f"{NAMED}/map").json()["classes"]} == set(BIRDS)
    sent = {"files": form(pictures("owl", 3))}
    rows = client.post(f"{NAMED}/predict?top=2", **sent).json()["predictions"]
    assert [row["label"] for row in rows] == birds().predict(pictures("owl", 3)).labels
    first = client.post("/predict", **sent).json()
    assert first == client.post("/models/toy/predict", **sent).json()
    assert {row["label"] for row in first["predictions"]} <= set(known(client, ""))


def test_what_is_taught_to_one_is_written_to_its_file_alone(client, tmp_path):
    other = (tmp_path / "toy.protosteer").read_bytes()
    assert client.post(f"{NAMED}/classes/ant", files=form(pictures("ant", 4))).status_code == 401
    answer = client.post(f"{NAMED}/classes/ant", files=form(pictures("ant", 4)), headers=BEARER)
    assert answer.status_code == 201, answer.text
    assert known(client, NAMED) == [*BIRDS, "ant"] and known(client, "")[:2] == SPRING
    assert Learner.load(tmp_path / "birds.protosteer", tiny_backbone()).classes == [*BIRDS, "ant"]
    assert (tmp_path / "toy.protosteer").read_bytes() == other
    assert client.delete(f"{NAMED}/classes/owl", headers=BEARER).json()["classes"] == ["owl"]
    assert known(client, NAMED) == ["kite", "wren", "ant"]


def test_jobs_belong_to_their_model(client):
    job = client.post("/classes/new?train=true", files=form(pictures("new", 4)), headers=BEARER).json()["job"]
    assert client.get(f"/models/toy/jobs/{job}").json()["class"] == "new"
    assert client.get(f"{NAMED}/jobs/{job}").status_code == 404


@pytest.mark.parametrize("path", ["predict", "classes/new"])
def test_an_unknown_model_is_refused_with_those_there_are(client, path):
    answer = client.post(f"/models/shop/{path}", files=form(pictures("ant", 1)), headers=BEARER)
    assert answer.status_code == 404
    assert answer.json() == {"detail": "no model is named 'shop'; there are: toy, my \"birds\""}
    assert client.get("/models/a%0Ab/model").json()["detail"].isprintable()


def test_a_full_queue_of_one_model_is_not_that_of_another(tmp_path, monkeypatch):
    app = both(tmp_path, limits=Limits(images=2, queue=2))
    monkeypatch.setattr(app.state.service.batcher, "length", 2)
    with TestClient(app) as client:
        assert client.post("/predict", files=form(pictures("ant", 1))).status_code == 503
        assert client.post(f"{NAMED}/predict", files=form(pictures("owl", 1))).status_code == 200
        monkeypatch.undo()


def test_models_that_share_a_backbone_answer_at_once_as_they_do_alone(tmp_path):
    learners = {"toy": taught(Settings.preset("instant"))}
    learners["birds"] = birds(learners["toy"].backbone)
    learners["birds"].save(tmp_path / "birds.protosteer")
    others = {"birds": (learners["birds"], tmp_path / "birds.protosteer")}
    pixels = pictures("owl", 24)
    alone = {name: learner.predict(pixels) for name, learner in learners.items()}

    def ask(number: int) -> bool:
        name = list(learners)[number % 2]
        sent = form(pixels[number : number + 1])
        (row,) = client.post(f"/models/{name}/predict", files=sent).json()["predictions"]
        expected = alone[name].probabilities[number].max().item()
        return row["label"] == alone[name].labels[number] and row["probability"] == pytest.approx(expected, rel=1e-4)

    with TestClient(service(tmp_path, learners["toy"], others=others)) as client, ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(24)))


def test_metrics_tell_the_models_apart(client):
    client.post(f"{NAMED}/predict", files=form(pictures("owl", 3)))
    for number in range(3):
        client.get(f"/models/{number}/classes")
    lines = client.get("/metrics").text.splitlines()
    label = r'model="my \"birds\""'
    assert f"protosteer_images_total{{{label}}} 3.0" in lines
    assert 'protosteer_images_total{model="toy"} 0.0' in lines
    assert f"protosteer_classes{{{label}}} 3.0" in lines and 'protosteer_classes{model="toy"} 4.0' in lines
    posted = f'method="POST",{label},route="/models/{{model}}/predict",status="200"'
    assert f"protosteer_requests_total{{{posted}}} 1.0" in lines
    unknown = (
        'method="GET",model="",route="/models/{model}/classes",status="404"'  # names that others choose are no labels
    )
    assert f"protosteer_requests_total{{{unknown}}} 3.0" in lines


def test_stopping_stops_all(tmp_path):
    app = both(tmp_path)
    with TestClient(app) as client:
        app.state.models.stop()
        for prefix in ("", NAMED):
            answer = client.post(f"{prefix}/predict", files=form(pictures("ant", 1)))
            assert answer.status_code == 503 and "stopping" in answer.json()["detail"]


def test_every_route_of_a_model_has_a_twin_that_names_it(client):
    paths = client.get("/openapi.json").json()["paths"]
    twins = {path.removeprefix("/models/{model}") for path in paths if path.startswith("/models/{model}/")}
    assert twins == set(paths) - {f"/models/{{model}}{path}" for path in twins} - {"/models", "/healthz", "/metrics"}
    for path in twins:
        for method, operation in paths[f"/models/{{model}}{path}"].items():
            assert [p["name"] for p in operation["parameters"]].count("model") == 1
            assert operation["responses"]["404"]["description"] == "No such model, class, job or correction"
            assert operation.get("security") == paths[path][method].get("security")


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("toy", "b.protosteer", "name-taken"),
        ("again", "toy.protosteer", "name-taken"),
        ("a/b", "b.protosteer", "bad-name"),
        ("..", "b.protosteer", "bad-name"),
        ("", "b.protosteer", "bad-name"),
        ("a\nb", "b.protosteer", "bad-name"),
    ],
)
def test_names_that_lead_nowhere_are_refused(tmp_path, name, file, words):
    learner = taught()
    learner.save(tmp_path / "toy.protosteer")
    with expect_error(words, SettingsError):
        create_app(learner, tmp_path / "toy.protosteer", others={name: (learner, tmp_path / file)})


# The command


@pytest.fixture
def started(monkeypatch) -> list[FastAPI]:
    """What `protosteer serve` would have served."""
    apps: list[FastAPI] = []

    def run(app, host, port, *, access_log, on_ready):
        apps.append(app)
        on_ready(f"http://{host}:{port}/")

    monkeypatch.setattr("protosteer.serve.app.run", run)
    return apps


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, classes in (("shop", SPRING), ("birds", BIRDS), ("a=b", ["x", "y"])):
        learner = Learner(Backbone.load("nano"), Settings.preset("instant"))
        learner.learn(easy_task(classes, per_class=3), name=name)
        learner.save(f"{name}.protosteer")
    return tmp_path


def test_the_command_names_its_models_and_loads_their_backbone_once(files, started, capsys):
    words = ["serve", "tools=shop.protosteer", "birds.protosteer", "a=b.protosteer", "--allow-teach"]
    said = run_cli(capsys, *words, "--token", TOKEN).err.splitlines()
    assert said[0] == "serving 3 models at http://127.0.0.1:8000/ (Ctrl-C stops)"
    assert [line for line in said if re.match(r"(?!note)\S+: ", line)] == [
        "tools: shop.protosteer, 2 classes",
        "birds: birds.protosteer, 3 classes",
        "a=b: a=b.protosteer, 2 classes",
    ]
    (app,) = started
    services = app.state.models.services
    assert list(services) == ["tools", "birds", "a=b"]
    assert len({id(one.store.current.learner.backbone.vit) for one in services.values()}) == 1


def test_the_command_serves_one_model_as_ever(files, started, capsys):
    assert main(["serve", "shop.protosteer"]) == 0
    assert capsys.readouterr().err.splitlines()[0].startswith("serving shop.protosteer, 2 classes, at http://")
    assert list(started[0].state.models.services) == ["shop"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["shop.protosteer", "shop=birds.protosteer"], "two models are named 'shop'"),
        (["shop.protosteer", "x=shop.protosteer"], "are one file"),
        (["shop.protosteer", "=birds.protosteer"], "has no name"),
        (["shop.protosteer", "x="], "the path is empty"),
        (["shop.protosteer", "x=nothing.protosteer"], "nothing.protosteer"),
    ],
)
def test_the_command_refuses_in_one_line(files, started, capsys, words, reason):
    assert main(["serve", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line and not started
