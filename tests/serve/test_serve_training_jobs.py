"""Teaching and forgetting over HTTP: who may, what is written when, and prompts trained in the background."""

import dataclasses
import errno
import gc
import os
import threading
import weakref

import pytest
import torch

from expect import expect_error

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from fastapi.testclient import TestClient

from conftest import easy_task, tiny_backbone
from protosteer.errors import ModelFileError
from protosteer.learner import Learner
from protosteer.model.file import Model
from protosteer.model.memory import Memory
from protosteer.model.unlearning import forget
from protosteer.serve.app import create_app
from protosteer.serve.limits import Limits
from protosteer.serve.training_jobs import Jobs
from serve_toys import BEARER, PATIENCE, QUICK, form, pictures, service, taught, until

pytestmark = pytest.mark.slow


@pytest.fixture
def client(tmp_path):
    with TestClient(service(tmp_path)) as client:
        yield client


def post_class(client: TestClient, name: str = "fox", query: str = "", count: int = 6):
    return client.post(f"/classes/{name}{query}", files=form(pictures(name, count)), headers=BEARER)


def on_disk(client: TestClient) -> Learner:
    return Learner.load(client.app.state.service.store.path, tiny_backbone())


def names(client: TestClient) -> list[str]:
    return [c["name"] for c in client.get("/classes").json()["classes"]]


def ended(client: TestClient, job: str) -> dict:
    """The job's last answer."""
    until(lambda: client.get(f"/jobs/{job}").json()["state"] in ("done", "failed"))
    return client.get(f"/jobs/{job}").json()


# Who may


def test_teaching_must_be_allowed(tmp_path):
    with TestClient(service(tmp_path, teach=False)) as client:
        for answer in (post_class(client), client.delete("/classes/ant", headers=BEARER)):
            assert answer.status_code == 403 and "allow_teach=True" in answer.json()["detail"]
        assert client.get("/model").json()["teaching"] is False and "ant" in names(client)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic open sesame", "Bearer open sesame!"])
def test_only_the_token_opens(client, header):
    headers = {} if header is None else {"Authorization": header}
    for answer in (
        client.post("/classes/fox", files=form(pictures("fox")), headers=headers),
        client.delete("/classes/ant", headers=headers),
    ):
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert names(client) == ["ant", "bee", "cat", "dog"]


def test_a_token_may_have_any_letters(tmp_path):
    with TestClient(service(tmp_path, token="schlüssel")) as client:
        headers = {"Authorization": "Bearer schlüssel".encode()}
        assert client.delete("/classes/ant", headers=headers).status_code == 200


# Adding


def test_a_class_is_recognised_at_once_and_is_in_the_file(client):
    before = client.post("/predict", files=form(pictures("fox"))).json()["predictions"]
    assert "fox" not in {p["label"] for p in before}
    answer = post_class(client)
    assert answer.status_code == 201
    assert answer.json() == {"class": "fox", "task": "fox", "images": 6, "job": None}
    after = client.post("/predict", files=form(pictures("fox"))).json()["predictions"]
    assert [p["label"] for p in after].count("fox") >= 7
    assert names(client) == on_disk(client).classes == ["ant", "bee", "cat", "dog", "fox"]
    assert "fox" in {c["name"] for c in client.get("/map").json()["classes"]}
    task = client.get("/model").json()["tasks"][-1]
    assert task["learned"] and task["image_bytes"] == sum(len(f[1][1]) for f in form(pictures("fox", 6)))


@pytest.mark.parametrize("name", ["red fox", "Füchse / Dachse", "狐", "50 % ?#&", "x" * 200])
def test_names_may_be_nearly_anything(client, name):
    from urllib.parse import quote

    path = f"/classes/{quote(name, safe='')}"
    assert client.post(path, files=form(pictures("fox")), headers=BEARER).json()["class"] == name
    assert name in names(client) and name in on_disk(client).classes
    assert client.delete(path, headers=BEARER).json()["classes"] == [name]
    assert name not in names(client)


@pytest.mark.parametrize("path", ["", "%20", "x" * 201, "x" * 1000, "a%09b", "a%00", "a%0Ab", "a%1b[2J", "a%E2%80%A8b"])
def test_names_that_no_class_may_have(client, path):
    answer = client.post(f"/classes/{path}", files=form(pictures("fox")), headers=BEARER)
    detail = answer.json()["detail"]
    assert answer.status_code == 404 if "%0A" in path else answer.status_code == 422 and "name" in detail
    assert detail.isprintable()
    assert len(names(client)) == 4


def test_a_class_that_exists_grows_and_bad_images_are_refused(client):
    before = client.get("/classes").json()["classes"][0]
    answer = post_class(client, "ant")
    assert answer.status_code == 201
    grown = client.get("/classes").json()["classes"][0]
    assert grown["tasks"] == ["ant task", "ant"] and grown["images"] == before["images"] + answer.json()["images"]
    bad = [*form(pictures("fox", 2)), ("images", ("bad.png", b"junk"))]
    answer = client.post("/classes/fox?train=true", files=bad, headers=BEARER)
    assert answer.status_code == 422 and answer.json()["detail"].startswith("bad.png")
    assert names(client) == on_disk(client).classes == ["ant", "bee", "cat", "dog"]
    assert client.app.state.service.jobs.open_count == 0


# Forgetting


def test_a_forgotten_class_is_gone_and_the_answer_says_what_that_is_worth(client):
    store = client.app.state.service.store
    expected = forget(Memory(store.current.memory.tasks), "dog")
    answer = client.delete("/classes/dog", headers=BEARER)
    assert answer.status_code == 200
    assert answer.json() == dataclasses.asdict(expected) and not expected.exact
    assert names(client) == on_disk(client).classes == ["ant", "bee", "cat"]
    answer = client.delete("/classes/dog", headers=BEARER)
    assert answer.status_code == 404 and "no class is named 'dog'" in answer.json()["detail"]


def test_the_only_class_stays(tmp_path):
    learner = Learner(tiny_backbone(), QUICK)
    learner.learn(easy_task(["ant"]), name="one")
    with TestClient(service(tmp_path, learner)) as client:
        answer = client.delete("/classes/ant", headers=BEARER)
        assert answer.status_code == 409 and "only class" in answer.json()["detail"]
        assert names(client) == ["ant"]


# Writing


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EACCES, 500)])
def test_what_cannot_be_written_does_not_happen(client, monkeypatch, number, status):
    store = client.app.state.service.store
    before, file = store.current, store.path.read_bytes()

    def refuse(*_):
        raise OSError(number, "the disk says no")

    monkeypatch.setattr("protosteer.model.file.write_atomically", refuse)
    for answer in (post_class(client), client.delete("/classes/ant", headers=BEARER)):
        assert answer.status_code == status
        detail = "toy.protosteer cannot be written (the disk says no); nothing was changed"
        assert answer.json() == {"detail": detail}
    assert store.current is before and store.path.read_bytes() == file
    monkeypatch.undo()
    assert post_class(client).status_code == 201 and "fox" in on_disk(client).classes


def test_a_change_is_written_before_it_is_seen(client, monkeypatch):
    store = client.app.state.service.store
    write, seen = Model.write, []

    def watched(model, path):
        seen.append((names(client), model.memory.classes))
        write(model, path)

    monkeypatch.setattr(Model, "write", watched)
    assert post_class(client).status_code == 201
    old = ["ant", "bee", "cat", "dog"]
    assert seen == [(old, [*old, "fox"])] and store.current.memory.classes == [*old, "fox"]


def test_a_file_that_somebody_else_changed_is_left_alone(client):
    other = on_disk(client)
    other.add_class("gnu", pictures("gnu"))
    other.save(client.app.state.service.store.path)
    for answer in (post_class(client), client.delete("/classes/ant", headers=BEARER)):
        assert answer.status_code == 409
        assert "changed on disk; restart the service" in answer.json()["detail"]
    assert "gnu" in on_disk(client).classes and names(client) == ["ant", "bee", "cat", "dog"]


def test_a_model_that_is_not_the_one_in_its_file_cannot_be_taught(tmp_path):
    path = tmp_path / "toy.protosteer"
    learner = taught()
    learner.save(path)
    learner.add_class("gnu", pictures("gnu"))
    with expect_error("other-model", ModelFileError):
        create_app(learner, path, allow_teach=True, token="x")
    create_app(learner, path)


def test_changes_wait_for_each_other_and_none_is_lost(client):
    wanted = [f"class {n}" for n in range(8)]
    threads = [threading.Thread(target=post_class, args=(client, name)) for name in wanted]
    threads.append(threading.Thread(target=client.delete, args=("/classes/ant",), kwargs={"headers": BEARER}))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(names(client)) == set(on_disk(client).classes) == {"bee", "cat", "dog", *wanted}


# Training in the background


@pytest.fixture
def held(monkeypatch):
    """Trainings stop at their first step until they are let go."""
    reached, go_on = threading.Event(), threading.Event()
    learn = Learner.learn

    def slow(self, data, name=None, on_stage=None, **options):
        def at_stage(stage):
            if stage.training:
                reached.set()
                assert go_on.wait(PATIENCE)
            on_stage(stage)

        return learn(self, data, name, at_stage, **options)

    monkeypatch.setattr(Learner, "learn", slow)
    yield reached, go_on
    go_on.set()


def test_a_class_gets_a_prompt_of_its_own_as_if_learned_in_its_turn(client):
    answer = post_class(client, query="?train=true", count=8)
    assert answer.status_code == 201 and answer.json()["task"] == "fox"
    status = ended(client, answer.json()["job"])
    assert status["class"] == "fox" and status["state"] == "done" and status["seconds_left"] == 0
    assert status["done"] == status["total"] == 2
    in_turn = taught()
    expected = in_turn.learn((pictures("fox", 8), ["fox"] * 8), name="fox")
    record = on_disk(client).memory.tasks[-1]
    assert torch.equal(record.prompt, expected.prompt) and not record.few_shot
    assert torch.equal(record.classes[0].values.means, expected.classes[0].values.means)
    assert (
        record.classes[0].heldout_similarities is not None and record.metadata.learned and record.metadata.image_bytes
    )
    assert names(client) == ["ant", "bee", "cat", "dog", "fox"]
    served = client.post("/predict", files=form(pictures("fox"))).json()["predictions"]
    assert [p["label"] for p in served] == on_disk(client).predict(pictures("fox")).labels


def test_by_evidence_an_added_class_shares_the_prompt_for_all_classes_before_and_after_its_training(tmp_path):
    with TestClient(service(tmp_path, taught(QUICK.replace(rule="evidence")))) as client:
        assert client.get("/model").json()["trainable"]
        answer = post_class(client, query="?train=true", count=8)
        added = on_disk(client).memory
        assert added.records[-1].plain is not None and added.records[-1].shared is not None
        assert ended(client, answer.json()["job"])["state"] == "done"
        learner = on_disk(client)
        served = client.post("/predict", files=form(pictures("fox"))).json()["predictions"]
    memory = learner.memory
    first, *_, record = memory.tasks
    assert record.prompt is not None and not record.few_shot and record.classes[0].shared is not None
    assert torch.equal(record.shared_prompt, first.shared_prompt) and torch.equal(memory.shared_prompt, first.prompt)
    assert len(learner.reader.known_similarities()) == 40  # the new class has its say
    assert [p["label"] for p in served] == learner.predict(pictures("fox")).labels
    expected = taught(QUICK.replace(rule="evidence")).learn((pictures("fox", 8), ["fox"] * 8), name="fox")
    assert torch.equal(record.classes[0].plain.points, expected.classes[0].plain.points)
    assert torch.equal(record.classes[0].shared.points, expected.classes[0].shared.points)
    assert torch.equal(record.prompt, expected.prompt)


def test_predictions_and_changes_go_on_during_a_training(client, held):
    reached, go_on = held
    job = post_class(client, query="?train=true").json()["job"]
    assert reached.wait(PATIENCE)
    status = client.get(f"/jobs/{job}").json()
    assert status["state"] == "training" and status["message"]
    assert client.post("/predict", files=form(pictures("fox", 1))).status_code == 200
    assert post_class(client, "gnu").status_code == 201
    assert client.delete("/classes/ant", headers=BEARER).status_code == 200
    go_on.set()
    assert ended(client, job)["state"] == "done"
    assert names(client) == on_disk(client).classes == ["bee", "cat", "dog", "fox", "gnu"]
    assert [task.few_shot for task in on_disk(client).memory.tasks] == [False, False, False, True]


def test_what_is_asked_meanwhile_does_not_change_what_is_trained(client, held):
    """All threads share torch's generator: one number drawn beside a training, and its prompt is another."""
    reached, go_on = held
    job = post_class(client, query="?train=true", count=8).json()["job"]
    assert reached.wait(PATIENCE)
    assert client.post("/predict", files=form(pictures("fox", 1))).status_code == 200
    assert post_class(client, "gnu").status_code == 201
    assert client.get("/map").status_code == client.get("/model").status_code == 200
    assert "fox" in on_disk(client).classes
    go_on.set()
    assert ended(client, job)["state"] == "done"
    alone = taught().learn((pictures("fox", 8), ["fox"] * 8), name="fox", on_stage=lambda stage: None)
    record = next(task for task in on_disk(client).memory.tasks if task.name == "fox")
    assert torch.equal(record.prompt, alone.prompt)


def test_a_training_forgets_what_is_deleted_meanwhile(client, held):
    """Deleting gnu is said to be exact: no prompt that is trained at that moment may have met it."""
    reached, go_on = held
    assert post_class(client, "gnu").status_code == 201
    job = post_class(client, query="?train=true", count=8).json()["job"]
    assert reached.wait(PATIENCE)
    assert client.delete("/classes/gnu", headers=BEARER).json()["exact"]
    go_on.set()
    assert ended(client, job)["state"] == "done"
    never = taught().learn((pictures("fox", 8), ["fox"] * 8), name="fox", on_stage=lambda stage: None)
    assert torch.equal(on_disk(client).memory.tasks[-1].prompt, never.prompt)


def test_a_class_that_is_deleted_ends_its_training(client, held):
    reached, go_on = held
    job = post_class(client, query="?train=true").json()["job"]
    assert reached.wait(PATIENCE)
    assert client.delete("/classes/fox", headers=BEARER).status_code == 200
    assert post_class(client).status_code == 201  # again, from other images: the old training is not about it
    file = client.app.state.service.store.path.read_bytes()
    go_on.set()
    status = ended(client, job)
    assert status["state"] == "failed" and "was deleted" in status["message"]
    assert status["done"] == 0
    assert client.app.state.service.store.path.read_bytes() == file


def test_trainings_wait_in_a_short_queue(tmp_path, held):
    reached, go_on = held
    with TestClient(service(tmp_path, limits=Limits(jobs=2))) as client:
        jobs = [post_class(client, name, "?train=true").json()["job"] for name in ("fox", "gnu")]
        assert reached.wait(PATIENCE)
        waiting = {"state": "waiting", "done": 0, "total": 0, "seconds_left": None, "message": ""}
        assert client.get(f"/jobs/{jobs[1]}").json() == {"id": jobs[1], "class": "gnu", **waiting}
        answer = post_class(client, "hen", "?train=true")
        assert answer.status_code == 503 and answer.headers["retry-after"] and "hen" not in names(client)
        assert post_class(client, "hen").status_code == 201
        go_on.set()
        assert [ended(client, job)["state"] for job in jobs] == ["done", "done"]
        assert post_class(client, "ibis", "?train=true").status_code == 201


def test_stopping_the_service_ends_a_training(tmp_path, held):
    reached, go_on = held
    app = service(tmp_path)
    with TestClient(app) as client:
        job = post_class(client, query="?train=true").json()["job"]
        assert reached.wait(PATIENCE)
        app.state.service.stop()
        go_on.set()
        status = ended(client, job)
        assert status["state"] == "failed" and "stopping" in status["message"]
        assert on_disk(client).memory.tasks[-1].few_shot


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"independent": True}, "independent"),
        ({"prompts": False}, "no prompts"),
        ({"rule": "evidence", "prompt_tasks": "first"}, "one shared prompt"),
        ({"rule": "evidence", "prompts": False}, "no prompts"),
    ],
)
def test_where_there_is_nothing_to_train_it_is_said(tmp_path, changes, words):
    with TestClient(service(tmp_path, taught(QUICK.replace(**changes)))) as client:
        answer = post_class(client, query="?train=true")
        assert answer.status_code == 422 and words in answer.json()["detail"]
        assert "fox" not in names(client) and not client.get("/model").json()["trainable"]
        answer = post_class(client)
        assert answer.status_code == 201 and answer.json()["job"] is None


def test_a_class_that_is_left_alone_is_not_trained(tmp_path, held):
    reached, go_on = held
    learner = Learner(tiny_backbone(), QUICK)
    learner.add_class("ant", pictures("ant"))
    with TestClient(service(tmp_path, learner)) as client:
        first = post_class(client, "fox", "?train=true").json()["job"]
        assert reached.wait(PATIENCE)
        second = post_class(client, "gnu", "?train=true").json()["job"]
        for name in ("ant", "fox"):
            assert client.delete(f"/classes/{name}", headers=BEARER).status_code == 200
        go_on.set()
        assert ended(client, first)["state"] == ended(client, second)["state"] == "failed"
        assert "no class is left" in client.get(f"/jobs/{second}").json()["message"]


def test_a_training_that_cannot_be_written_leaves_the_class_as_it_was(client, held, monkeypatch):
    reached, go_on = held
    job = post_class(client, query="?train=true").json()["job"]
    assert reached.wait(PATIENCE)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr("protosteer.model.file.write_atomically", refuse)
    go_on.set()
    status = ended(client, job)
    assert status["state"] == "failed" and "the disk is full" in status["message"]
    assert client.app.state.service.store.current.memory.tasks[-1].few_shot


def test_an_unexpected_failure_is_told_in_one_line(client, monkeypatch, caplog):
    monkeypatch.setattr("protosteer.serve.training_jobs._complete", lambda trained, added: 1 / 0)
    status = ended(client, post_class(client, query="?train=true").json()["job"])
    assert status["state"] == "failed"
    assert status["message"] == "the training failed (ZeroDivisionError); the log of the service says more"
    assert "division by zero" in caplog.text


def test_images_are_gone_when_the_training_has_ended(client, monkeypatch):
    references, start = [], Jobs.start

    def noted(self, job, record, pixels):
        references.append(weakref.ref(pixels))
        start(self, job, record, pixels)

    monkeypatch.setattr(Jobs, "start", noted)
    ended(client, post_class(client, query="?train=true").json()["job"])
    (image,) = references
    until(lambda: gc.collect() is not None and image() is None)


def test_old_jobs_are_forgotten_and_unknown_ones_refused(client, monkeypatch):
    monkeypatch.setattr("protosteer.serve.training_jobs._MAX_ENDED", 1)
    jobs = []
    for name in ("fox", "gnu", "hen"):
        jobs.append(post_class(client, name, "?train=true").json()["job"])
        ended(client, jobs[-1])
    assert [client.get(f"/jobs/{job}").status_code for job in (*jobs, "none")] == [404, 200, 200, 404]


@pytest.mark.parametrize("teach", [True, False])
def test_what_killed_writers_left_is_removed_at_the_start(tmp_path, teach):
    app = service(tmp_path, teach=teach)
    left, other = tmp_path / ".toy.protosteer.abc.tmp", tmp_path / ".another.protosteer.abc.tmp"
    for path in (left, other):
        path.write_bytes(b"a whole model")
        os.utime(path, (0, 0))
    with TestClient(app):
        assert left.exists() is not teach and other.exists()  # a service that only reads removes nothing
