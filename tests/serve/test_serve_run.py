"""A real server on a real socket: clients that go away, uploads that are too large, and the end."""

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
from serve_toys import PATIENCE, encoded, pictures, served, service, until

PICTURE = encoded(pictures("ant", 1)[0])


def sent(port: int, picture: bytes = PICTURE) -> http.client.HTTPConnection:
    """A request for prediction, on its way."""
    head = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    connection.request("POST", "/predict", head + picture + b"\r\n--b--\r\n", headers)
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
