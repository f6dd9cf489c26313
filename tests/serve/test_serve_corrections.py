"""Corrections over HTTP: one image, told what it is, logged and taken back."""

import base64
import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from fastapi.testclient import TestClient

from conftest import tiny_backbone
from photo_toys import photos
from protosteer.errors import ProtosteerWarning
from protosteer.learner import Learner
from protosteer.model import thumbnails
from protosteer.model.records import correction_name
from protosteer.settings import Settings
from protosteer.util.files import digest
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import TaskSlot, learn_folder
from protosteer.workflows.thumbnails import keep_thumbnails
from serve_toys import BEARER, encoded, form, pictures, service, taught

pytestmark = pytest.mark.slow

EVIDENCE = Settings.preset("instant")


@pytest.fixture
def client(tmp_path):
    with TestClient(service(tmp_path, taught(EVIDENCE))) as client:
        yield client


def an_ant() -> bytes:
    return encoded(pictures("ant", 1)[0])


def correct(client: TestClient, name: str, content: bytes, file: str = "7.png", prefix: str = ""):
    files = [("images", (file, content))]
    return client.post(f"{prefix}/corrections", params={"class": name}, files=files, headers=BEARER)


def label(client: TestClient, content: bytes) -> str:
    answer = client.post("/predict", files=[("images", ("7.png", content))])
    return answer.json()["predictions"][0]["label"]


def model_bytes(client: TestClient) -> bytes:
    return client.app.state.service.store.path.read_bytes()


def log(client: TestClient) -> list[dict]:
    return client.get("/corrections", headers=BEARER).json()["corrections"]


@pytest.mark.parametrize("name", ["bee", "red yak / 狐"])
@pytest.mark.parametrize("settings", [EVIDENCE, None])
def test_one_image_is_enough_and_undo_restores_the_file_to_the_bit(tmp_path, name, settings):
    learner = taught(settings) if settings else taught()
    with TestClient(service(tmp_path, learner)) as client:
        content, before = an_ant(), model_bytes(client)
        assert label(client, content) == "ant"
        answer = correct(client, name, content)
        assert answer.status_code == 201
        told = answer.json()
        probability, date = told.pop("probability"), told.pop("date")
        assert told == {
            "correction": correction_name(digest(content)),
            "image": "7.png",
            "taken_for": "ant",
            "class": name,
            "confirmed": False,
            "new_class": name != "bee",
            "answer": name,
        }
        assert 0 < probability <= 1 and len(date) == 10
        assert label(client, content) == name
        on_disk = Learner.load(client.app.state.service.store.path, tiny_backbone())
        assert [record.name for record in on_disk.memory.corrections] == [told["correction"]]
        store = client.app.state.service.store
        store.settle()  # then it predicts, to the bit, as the file does
        served, read = (learner.predict(pictures("ant", 3)) for learner in (store.current.learner, on_disk))
        assert (
            torch.equal(served.scores, read.scores) and store.current.memory.corrections[0].name == told["correction"]
        )
        undone = client.delete("/corrections/last", headers=BEARER)
        assert undone.json()["taken_back"]["class"] == name
        assert label(client, content) == "ant" and model_bytes(client) == before


def test_the_log_names_each_and_any_can_be_taken_back(client):
    one, two = (encoded(picture) for picture in pictures("ant", 2))
    made = [correct(client, "bee", one, "1.png").json(), correct(client, "cat", two, "2.png").json()]
    assert [(row["image"], row["taken_for"], row["class"]) for row in log(client)] == [
        ("1.png", "ant", "bee"),
        ("2.png", "ant", "cat"),
    ]
    assert "protosteer_corrections{" in client.get("/metrics").text
    assert client.delete(f"/corrections/{made[0]['correction']}", headers=BEARER).status_code == 200
    assert [row["correction"] for row in log(client)] == [made[1]["correction"]]
    assert label(client, one) == "ant" and label(client, two) == "cat"


def test_right_answers_are_confirmed_several_at_once(client):
    before = model_bytes(client)
    files = form(torch.cat([pictures("ant", 2), pictures("bee", 1, seed=3)]))
    answer = client.post("/confirmations", files=files, headers=BEARER)
    rows = answer.json()["corrections"]
    assert answer.status_code == 201 and log(client) == rows and len(rows) == 3
    assert all(row["confirmed"] and row["class"] == row["taken_for"] for row in rows)
    assert rows[0]["class"] == label(client, an_ant()) and client.post("/confirmations", files=files).status_code == 401
    for _ in rows:
        client.delete("/corrections/last", headers=BEARER)
    assert model_bytes(client) == before


def test_the_same_image_is_corrected_anew_not_twice(client):
    correct(client, "bee", an_ant())
    assert correct(client, "cat", an_ant()).json()["taken_for"] == "bee"
    assert [row["class"] for row in log(client)] == ["cat"]


def test_only_the_token_opens(client, tmp_path):
    files = [("images", ("7.png", an_ant()))]
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for answer in (
            client.post("/corrections?class=bee", files=files, headers=headers),
            client.get("/corrections", headers=headers),
            client.delete("/corrections/last", headers=headers),
        ):
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert log(client) == []
    with TestClient(service(tmp_path, taught(EVIDENCE), teach=False)) as closed:
        assert correct(closed, "bee", an_ant()).status_code == 403


@pytest.mark.parametrize(
    ("name", "files", "status", "words"),
    [
        ("bee", form(pictures("ant", 3)), 422, "3 images cannot be one correction"),
        ("bee", [("images", ("notes.png", b"junk"))], 422, "notes.png cannot be read as an image"),
        ("bee", [("other", ("a.png", b"junk"))], 422, "no file in field 'images'"),
        (" ", form(pictures("ant", 1)), 422, "the class has no name"),
        ("x" * 201, form(pictures("ant", 1)), 422, "201 characters"),
        (None, form(pictures("ant", 1)), 422, "option class"),
    ],
)
def test_what_cannot_be_one_correction_is_refused_in_one_line(client, name, files, status, words):
    before = model_bytes(client)
    params = {} if name is None else {"class": name}
    answer = client.post("/corrections", params=params, files=files, headers=BEARER)
    assert answer.status_code == status and words in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"] and model_bytes(client) == before and log(client) == []


def test_there_may_be_nothing_to_take_back(client):
    answer = client.delete("/corrections/last", headers=BEARER)
    assert answer.status_code == 404 and "nothing has been corrected" in answer.json()["detail"]
    correct(client, "bee", an_ant())
    answer = client.delete("/corrections/ant%20task", headers=BEARER)
    assert answer.status_code == 404 and "no correction is named 'ant task'" in answer.json()["detail"]


def test_a_correction_that_is_all_that_is_left_stays(client):
    correct(client, "yak", an_ant())
    for name in ("ant", "bee", "cat", "dog"):
        assert client.delete(f"/classes/{name}", headers=BEARER).status_code == 200
    answer = client.delete("/corrections/last", headers=BEARER)
    assert answer.status_code == 409 and "'yak' is the only class" in answer.json()["detail"]
    assert len(log(client)) == 1


def test_a_forgotten_class_leaves_no_correction(client):
    correct(client, "yak", an_ant())
    assert client.delete("/classes/yak", headers=BEARER).json()["exact"]
    assert log(client) == [] and "yak" not in str(client.get("/model").json())


def test_a_full_disk_changes_nothing(client, monkeypatch):
    before = model_bytes(client)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    answer = correct(client, "bee", an_ant())
    assert answer.status_code == 507 and "nothing was changed" in answer.json()["detail"]
    monkeypatch.undo()
    assert label(client, an_ant()) == "ant" and model_bytes(client) == before and log(client) == []


def test_a_side_file_that_fails_is_not_reported_as_a_change_that_was_not_made(tmp_path, monkeypatch):
    learner, path = taught(EVIDENCE), tmp_path / "toy.protosteer"
    (task,) = learner.memory.tasks[:1]
    digests = [torch.tensor([row]) for row in range(len(task.classes))]
    learner.memory.replace(task, dataclasses.replace(task, classes=task.classes.with_rows("seen", digests)))
    learner.save(path)
    first, second = task.class_names[:2]
    jpeg = b"\xff\xd8\xff" + b"0" * 9
    thumbnails.write(path, [thumbnails.Thumb(first, 0, jpeg), thumbnails.Thumb(second, 1, jpeg)])
    with TestClient(service(tmp_path, learner, thumbnails=True)) as client:
        replace = os.replace

        def full(source: str, target: Path) -> None:
            if str(target).endswith(".thumbs"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(source, target)

        monkeypatch.setattr(os, "replace", full)
        with pytest.warns(ProtosteerWarning, match="thumbs"):
            assert client.delete(f"/classes/{first}", headers=BEARER).status_code == 200
        monkeypatch.undo()
        assert first not in [row["name"] for row in client.get("/classes").json()["classes"]]
        assert not thumbnails.beside(path).exists()
        assert correct(client, second, an_ant()).status_code == 201


def test_names_of_files_are_kept_as_one_short_line(client):
    told = correct(client, "bee", an_ant(), "a\u2028b" + "x" * 300 + ".png").json()
    assert told["image"].startswith("a?bxxx") and len(told["image"]) == 100


def test_of_several_models_the_one_that_is_named_is_corrected(tmp_path):
    other = taught(EVIDENCE)
    other.save(tmp_path / "other.protosteer")
    app = service(tmp_path, taught(EVIDENCE), others={"other": (other, tmp_path / "other.protosteer")})
    with TestClient(app) as client:
        assert correct(client, "bee", an_ant(), prefix="/models/other").status_code == 201
        assert log(client) == []
        told = client.get("/models/other/corrections", headers=BEARER).json()["corrections"]
        assert [row["class"] for row in told] == ["bee"]
        assert client.delete("/models/other/corrections/last", headers=BEARER).status_code == 200


def test_the_schema_tells_of_corrections(client):
    spec = client.get("/openapi.json").json()
    post = spec["paths"]["/corrections"]["post"]
    (name,) = post["parameters"]
    assert (name["name"], name["in"], name["required"]) == ("class", "query", True)
    assert post["security"] and "multipart/form-data" in post["requestBody"]["content"]
    assert set(spec["components"]["schemas"]["Corrected"]["properties"]) == {*correct(client, "bee", an_ant()).json()}


def test_reliability_is_of_images_that_were_left_out(client, tmp_path):
    told = client.get("/model").json()["reliability"]
    checked = client.app.state.service.store.current.learner.reader.loo_predictions()
    assert told["images"] == sum(b["images"] for b in told["bins"]) == len(checked.correct) > 0
    right = sum(b["images"] * b["accuracy"] / 100 for b in told["bins"] if b["images"])
    assert right == pytest.approx(int(checked.correct.sum())) and told["calibration_error"] >= 0
    classes = client.get("/classes").json()["classes"]
    assert [one["checked"] for one in classes] == checked.labels.bincount(minlength=len(classes)).tolist()
    assert [one["right"] for one in classes] == checked.labels[checked.correct].bincount(
        minlength=len(classes)
    ).tolist()
    for place, one in enumerate(classes):
        wrong = checked.predicted[(checked.labels == place) & ~checked.correct].tolist()
        counts = [wrong.count(other) for other in range(len(classes))]
        best = one["confused_with"]
        assert best is None if not wrong else counts[[c["name"] for c in classes].index(best)] == max(counts)
    with TestClient(service(tmp_path, taught())) as by_the_papers_rule:
        assert by_the_papers_rule.get("/model").json()["reliability"] is None
        assert by_the_papers_rule.get("/classes").json()["classes"][0]["checked"] == 0


def test_thumbnails_are_served_where_they_are_to_be_shown_and_go_with_their_class(tmp_path):
    learner = Learner(tiny_backbone(), EVIDENCE)
    found = scan_folder(photos(tmp_path / "spring", ["ant", "bee"], 6))
    learn_folder(learner, found, holdout=0.0)
    learner.save(tmp_path / "toy.protosteer")
    keep_thumbnails(tmp_path / "toy.protosteer", TaskSlot.prepare(learner, found, None, 0.0))
    place = thumbnails.beside(tmp_path / "toy.protosteer")
    with TestClient(service(tmp_path, learner, thumbnails=True)) as client:
        assert [c["thumbnails"] for c in client.get("/classes").json()["classes"]] == [6, 6]
        told = client.get("/thumbnails/ant").json()
        assert told["class"] == "ant" and len(told["jpegs"]) == 6
        jpeg = base64.b64decode(told["jpegs"][0])
        assert jpeg in place.read_bytes()
        assert client.delete("/classes/ant", headers=BEARER).status_code == 200
        answer = client.get("/thumbnails/ant")
        assert answer.status_code == 404 and "no thumbnails here" in answer.json()["detail"]
        assert (
            jpeg not in place.read_bytes()
            and [
                thumb.name
                for thumb in thumbnails.read(tmp_path / "toy.protosteer", client.app.state.service.store.current.memory)
            ]
            == ["bee"] * 6
        )
    learner.forget("ant")
    with TestClient(service(tmp_path, learner)) as client:
        assert client.get("/thumbnails/bee").status_code == 404
        assert client.get("/classes").json()["classes"][0]["thumbnails"] == 0
