"""The load generator: that it sends what it says, notices what goes wrong, and measures a real service."""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

import pytest

from protosteer.bench import service
from protosteer.bench.service import Server, drive, requests_of
from protosteer.errors import ProtosteerError, ProtosteerWarning

pytestmark = pytest.mark.slow

installed = pytest.mark.skipif(
    importlib.util.find_spec("fastapi") is None, reason="the service's extra is not installed"
)

FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[Server, list[bytes]]]:
    """A server of one connection that gives these answers and then hangs up; and what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for answer in answers:
                heard.append(connection.recv(65536))
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Server(0, *listener.getsockname()), heard
    finally:
        thread.join(5)
        listener.close()


def test_one_connection_is_used_again_and_no_client_is_idle() -> None:
    with answering(FINE, FINE.replace(b"Content-Length", b"content-length")) as (server, heard):
        seconds = drive(server, [b"first", b"second"], 1)
    assert heard == [b"first", b"second"]
    assert len(seconds) == 2 and all(0 < each < 5 for each in seconds)
    with answering(FINE) as (server, _):
        assert len(drive(server, [b"request"], 64)) == 1


@pytest.mark.parametrize(
    "answers, message",
    [
        ((FINE, FINE.replace(b"200 OK", b"503 Busy")), "a request to the service failed: HTTP/1.1 503 Busy, {}"),
        ((FINE,), "hung up"),
    ],
)  # fmt: skip
def test_an_error_ends_the_measurement(answers: tuple[bytes, ...], message: str) -> None:
    with answering(*answers) as (server, _), pytest.raises(ProtosteerError, match=message):
        drive(server, [b"first", b"second"], 1)


def test_a_silent_service_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PATIENCE", 0.2)
    with answering(b"HTTP/1.1 200 OK\r\n", b"") as (server, _), pytest.raises(ProtosteerError, match="0.2 s"):
        drive(server, [b"request"], 1)


def test_requests_are_forms_with_the_files(tmp_path: Path) -> None:
    files = service.image_files("small", tmp_path)[:5]
    requests = requests_of(files, 2)
    assert len(requests) == 3
    head, _, body = requests[1].partition(b"\r\n\r\n")
    line, _, fields = head.partition(b"\r\n")
    assert line == b"POST /predict HTTP/1.1" and f"Content-Length: {len(body)}".encode() in fields
    form = message_from_bytes(fields + b"\r\n\r\n" + body).get_payload()
    assert [part.get_filename() for part in form] == [file.name for file in files[2:4]]
    assert [part.get_payload(decode=True) for part in form] == [file.read_bytes() for file in files[2:4]]


@installed
def test_throughput_of_a_real_service(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []

    def counted(server: Server, requests: list[bytes], clients: int) -> list[float]:
        sent.append((len(requests), clients))
        return drive(server, requests, clients)

    monkeypatch.setattr(service, "drive", counted)
    one, several = service.throughput("service", "small", 1, (1, 16))
    assert sent == [
        (32, 64),
        (2, 64),
        (32, 64),
        (2, 64),
        (8, 1),
        (8, 8),
        (32, 64),
    ]  # warm-up, repeat, latencies
    assert [one.name, several.name] == ["service", "service_16"]
    assert one.value > 0 and one.target == 0.9
    assert one.about.endswith("images a request: 1") and several.about.endswith("images a request: 16")
    assert one.notes[1].startswith("clients: 1, p50 ") and "; clients: 64, p50 " in one.notes[1]


@installed
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_memory_of_a_real_service() -> None:
    (ratio,) = service.flat_memory("small", early=20, later=40)
    assert 0.8 < ratio.value < 1.1
    assert ratio.about.endswith("after 20 requests, against after 60")
    *held, last = ratio.notes[0].split(", ")[:6]
    assert float(held[0]) / float(last.removesuffix(" MB")) == pytest.approx(ratio.value, abs=0.01)
    assert "every 8 requests" in ratio.notes[0]


def test_a_service_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = service.subprocess.Popen
    ended = [sys.executable, "-c", "raise SystemExit(1)"]
    monkeypatch.setattr(service.subprocess, "Popen", lambda command, **rest: popen(ended, **rest))
    message = "did not start; run -m protosteer.bench.service small"
    with pytest.raises(ProtosteerError, match=message), service.serving("small"):
        pass


def test_without_the_extra_there_is_a_hint_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "find_spec", lambda name: None)
    with pytest.warns(ProtosteerWarning, match="pip install 'protosteer\\[serve\\]'"):
        assert service.run(1) == []
