"""A real server on a real socket: clients that go away, uploads that are too large, and the end."""

import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from expect import expect_error

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from fastapi import FastAPI

import protosteer
from protosteer.errors import ProtosteerError
from protosteer.serve.app import run
from serve_toys import BEARER, PATIENCE, encoded, pictures, served, service, until

PICTURE = encoded(pictures("ant", 1)[0])


def sent(
    port: int, picture: bytes = PICTURE, address: str = "/predict", charset: str = "utf-8"
) -> http.client.HTTPConnection:
    """A request with one image, on its way."""
    head = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {"Content-Type": f"multipart/form-data; boundary=b; charset={charset}", **BEARER}
    connection.request("POST", address, head + picture + b"\r\n--b--\r\n", headers)
    return connection


def answer(connection: http.client.HTTPConnection) -> tuple[int, dict]:
    response = connection.getresponse()
    return response.status, json.loads(response.read())


class Slow:
    """A model that begins and goes on when it is told to."""

    def __init__(self, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
        snapshot = app.state.service.store.current
        self.predict = snapshot.predict
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.images = 0
        monkeypatch.setattr(snapshot, "predict", self)

    def __call__(self, pixels, top):
        self.entered.set()
        assert self.go_on.wait(PATIENCE)
        self.images += len(pixels)
        return self.predict(pixels, top)


def test_a_client_that_goes_away_is_not_predicted_for(tmp_path, monkeypatch):
    app = service(tmp_path, teach=False)
    slow, queue = Slow(app, monkeypatch), app.state.service.batcher
    with served(app) as (port, _):
        first = sent(port)
        assert slow.entered.wait(PATIENCE)
        second = sent(port)
        until(lambda: queue.length == 1)
        second.close()
        until(lambda: 'status="499"} 1.0' in app.state.service.metrics.text().decode())
        slow.go_on.set()
        assert answer(first)[0] == 200 and slow.images == 1
        assert answer(sent(port))[0] == 200 and slow.images == 2


def test_a_client_that_sends_too_much_can_read_why_it_is_refused(tmp_path):
    with served(service(tmp_path, teach=False)) as (port, _):
        status, body = answer(sent(port, bytes(65 * 2**20)))
        assert status == 413 and "larger than" in body["detail"]
        assert answer(sent(port))[0] == 200


@pytest.mark.parametrize(("seconds", "status"), [(PATIENCE, 200), (0.01, 503)])
def test_requests_that_are_open_when_the_server_stops_are_answered(tmp_path, monkeypatch, seconds, status):
    monkeypatch.setattr("protosteer.serve.service._DRAIN_SECONDS", seconds)
    app = service(tmp_path, teach=False)
    slow, queue = Slow(app, monkeypatch), app.state.service.batcher
    with served(app) as (port, server):
        first = sent(port)
        assert slow.entered.wait(PATIENCE)
        waiting = [sent(port) for _ in range(3)]
        until(lambda: queue.length == 3)
        server.should_exit = True
        until(lambda: queue._stopping and (status == 200 or time.monotonic() > queue._deadline))
        slow.go_on.set()
        assert answer(first)[0] == 200
        for got, body in map(answer, waiting):
            assert got == status and (got == 200 or "stopping" in body["detail"])


def test_changes_that_wait_when_the_server_stops_are_rejected(tmp_path, monkeypatch):
    """The one under way is made; the others are not, so that the end does not wait for all of them."""
    app = service(tmp_path)
    store, entered, go_on, changes = app.state.service.store, threading.Event(), threading.Event(), []
    change, uploads, decoded = store._change, app.state.service.uploads, []
    decode = uploads.decode

    def slow(memory):
        changes.append(memory)
        entered.set()
        assert go_on.wait(PATIENCE)
        change(memory)

    async def counted(files):
        decoded.append(await decode(files))
        return decoded[-1]

    monkeypatch.setattr(store, "_change", slow)
    monkeypatch.setattr(uploads, "decode", counted)
    with served(app) as (port, server):
        first = sent(port, address="/classes/fox")
        assert entered.wait(PATIENCE)
        waiting = [sent(port, address=f"/classes/new{i}") for i in range(20)]
        waiting += [sent(port, address="/corrections?class=ant") for _ in range(20)]
        until(lambda: len(decoded) == 41)
        server.should_exit = True
        until(lambda: store._stopping)
        go_on.set()
        assert answer(first)[0] == 201
        assert {answer(connection)[0] for connection in waiting} == {503}
    assert len(changes) == 1 and "fox" in store.current.learner.classes


@pytest.mark.parametrize("charset", ["undefined", "punycode", "idna", "zlib_codec", "no such"])
def test_a_form_in_an_odd_charset_is_no_failure_of_the_service(tmp_path, charset, caplog):
    with served(service(tmp_path, teach=False)) as (port, _):
        status, _ = answer(sent(port, charset=charset))
        assert status in (200, 422) and (status == 422 or charset != "undefined")
    assert "Traceback" not in caplog.text


def test_uploads_without_room_for_them_are_told_so(tmp_path, monkeypatch, caplog):
    """Large files lie in the temporary folder."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with served(service(tmp_path, teach=False)) as (port, _):
        status, body = answer(sent(port, PICTURE + bytes(2**21)))
        assert status == 507 and "No space left" in body["detail"]
        assert answer(sent(port))[0] == 200
    assert "Traceback" not in caplog.text


def test_an_address_that_is_taken_is_told_in_one_line(tmp_path):
    app = service(tmp_path, teach=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with expect_error("cannot-listen", ProtosteerError):
            run(app, "127.0.0.1", port)
    with expect_error("cannot-listen", ProtosteerError):
        run(app, "no.such.host.invalid", 0)


SCRIPT = """
import sys
from pathlib import Path
from protosteer.serve.app import run
from serve_toys import service
run(service(Path(sys.argv[1])), port=0, access_log=True, on_ready=lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_process_soon_and_quietly(tmp_path):
    here = Path(__file__).parent
    folders = [Path(protosteer.__file__).parents[1], here, here.parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        url = process.stdout.readline()
        assert url.startswith("http://127.0.0.1:")
        port = int(url.rstrip("/\n").rsplit(":", 1)[1])
        connection = sent(port)
        assert answer(connection)[0] == 200  # and stays open
        process.send_signal(signal.SIGINT)
        out, log = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0 and out == "ended\n"
    (line,) = log.splitlines()
    assert "POST /predict 200 " in line
