"""The load generator: that it sends what it says, notices what goes wrong, and measures a real service."""

from __future__ import annotations

import importlib.util
import io
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from protosteer.bench import service
from protosteer.bench.service import CASES, Load, Meter, Server, drive, quantile, requests_of
from protosteer.bench.subjects import small
from protosteer.errors import ProtosteerError, ProtosteerWarning

pytestmark = pytest.mark.slow

installed = pytest.mark.skipif(
    importlib.util.find_spec("fastapi") is None, reason="the service's extra is not installed"
)
linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")

FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def answering(*answers: bytes, pieces: int = 1) -> Iterator[tuple[Server, list[bytes]]]:
    """A server of one connection that gives these answers, in pieces, and then hangs up; and what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for answer in answers:
                heard.append(connection.recv(65536))
                size = len(answer) // pieces + 1
                for start in range(0, len(answer), size):
                    connection.sendall(answer[start : start + size])
                    threading.Event().wait(0.01 if pieces > 1 else 0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Server(0, *listener.getsockname()), heard
    finally:
        thread.join(5)
        listener.close()


def test_one_connection_is_used_again_and_answers_are_in_order() -> None:
    second = FINE.replace(b"{}", b"[]").replace(b"Content-Length", b"content-length")
    with answering(FINE, second) as (server, heard):
        answers = drive(server, [b"first", b"second"], 1)
    assert heard == [b"first", b"second"]
    assert [answer.body for answer in answers] == [b"{}", b"[]"]
    assert all(0 < answer.seconds < 5 for answer in answers)


def test_an_answer_may_come_in_pieces() -> None:
    long = FINE.replace(b"2\r\n", b"3000\r\n").replace(b"{}", b"x" * 3000)
    with answering(long, pieces=7) as (server, _):
        assert drive(server, [b"request"], 1)[0].body == b"x" * 3000


def test_no_more_clients_than_requests() -> None:
    with answering(FINE) as (server, _):
        assert len(drive(server, [b"request"], 64)) == 1


@pytest.mark.parametrize(
    "answers, message",
    [
        ((FINE, FINE.replace(b"200 OK", b"503 Busy")), "request 1 to the service failed: HTTP/1.1 503 Busy, {}"),
        ((FINE,), "request 1 to the service failed: the connection was closed"),
    ],
)  # fmt: skip
def test_an_error_ends_the_measurement(answers: tuple[bytes, ...], message: str) -> None:
    with answering(*answers) as (server, _), pytest.raises(ProtosteerError, match=message):
        drive(server, [b"first", b"second"], 1)


def test_a_silent_service_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PATIENCE", 0.2)
    with answering(b"HTTP/1.1 200 OK\r\n", b"") as (server, _), pytest.raises(ProtosteerError, match="0.2 s"):
        drive(server, [b"request"], 1)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ProtosteerError, match="cannot be reached"):
        drive(Server(0, *address), [b"request"], 1)


@pytest.mark.parametrize("share, value", [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_quantiles(share: float, value: float) -> None:
    assert quantile([4, 1, 3, 2], share) == value


def test_requests_are_forms_with_the_files(tmp_path: Path) -> None:
    files = service.image_files(small(), CASES["small"], tmp_path)[:5]
    requests = requests_of(files, 2)
    assert len(requests) == 3
    head, _, body = requests[1].partition(b"\r\n\r\n")
    line, _, fields = head.partition(b"\r\n")
    assert line == b"POST /predict HTTP/1.1" and f"Content-Length: {len(body)}".encode() in fields
    form = message_from_bytes(fields + b"\r\n\r\n" + body).get_payload()
    assert [part.get_filename() for part in form] == [file.name for file in files[2:4]]
    assert [part.get_payload(decode=True) for part in form] == [file.read_bytes() for file in files[2:4]]
    assert Image.open(io.BytesIO(form[0].get_payload(decode=True))).size == CASES["small"].size


def test_labels_other_than_predicts_are_counted() -> None:
    load = Load(Server(0, "", 0), [b"", b""])
    load.answers = [
        service.Answer(0.1, f'{{"predictions": [{{"label": "{a}"}}, {{"label": "{b}"}}]}}'.encode())
        for a, b in ("ab", "cd", "ab", "cx")
    ]
    assert load.told(list("abcd")) == "4 requests, no error; labels other than predict's: 1 of 8"
    with pytest.raises(ValueError):
        load.told(list("abcdef"))  # an image without an answer


@linux
def test_the_meter_tells_processor_time_here_and_there() -> None:
    meter = Meter(lambda: sum(range(5_000_000)), Server(os.getpid(), "", 0))  # as its own server
    meter.run()
    assert meter.here[0] > 0.02
    assert meter.there[0] == pytest.approx(meter.here[0], abs=0.03)  # the system counts in hundredths
    meter.here, meter.there = [0.1, 0.3, 0.2], [2.0, 1.0, 3.0]
    assert meter.told(100) == "service 20.00, load generator 2.00"
    predict = Meter(lambda: None)
    predict.run()
    assert predict.told(100) == "0.00"


@installed
def test_throughput_of_a_real_service() -> None:
    one, several = service.throughput("service", "small", 1, (1, 16))
    assert [one.name, several.name] == ["service", "service_16"]
    assert one.value > 0 and one.target == 0.9
    assert "64 clients, 1 image a request" in one.about and "16 images a request" in several.about
    assert one.notes[2] == "64 requests, no error; labels other than predict's: 0 of 64"
    assert several.notes[2] == "4 requests, no error; labels other than predict's: 0 of 64"
    assert one.notes[3].startswith("1 client: p50 ") and "; 64 clients: p50 " in one.notes[3]
    assert len(several.notes) == 3


@installed
@linux
def test_memory_of_a_real_service() -> None:
    (ratio,) = service.flat_memory("small", early=20, later=40)
    assert 0.8 < ratio.value < 1.1
    assert ratio.about.endswith("after 20 requests, against after 60")
    *held, last = ratio.notes[0].split(", ")[:6]
    assert float(held[0]) / float(last.removesuffix(" MB")) == pytest.approx(ratio.value, abs=0.01)
    assert "every 8 requests" in ratio.notes[0]


@installed
def test_a_service_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = service.subprocess.Popen
    monkeypatch.setattr(
        service.subprocess,
        "Popen",
        lambda command, **rest: popen([sys.executable, "-c", "raise SystemExit('no such thing')"], **rest),
    )
    message = "did not start: no such thing; run -m protosteer.bench"
    with pytest.raises(ProtosteerError, match=message), service.serving("small"):
        pass


def test_without_the_extra_there_is_a_hint_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "find_spec", lambda name: None)
    with pytest.warns(ProtosteerWarning, match="pip install 'protosteer\\[serve\\]'"):
        assert service.run(1) == []


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def note(kind: str, *given: object) -> list[object]:
        asked.append((kind, *given))
        return []

    monkeypatch.setattr(service, "find_spec", lambda name: object())
    for kind in ("throughput", "flat_memory"):
        monkeypatch.setattr(service, kind, partial(note, kind))
    service.run(3)
    assert asked == [
        ("throughput", "service_throughput", "tiny", 3),
        ("throughput", "service_throughput_nano", "nano", 3, (1, 16)),
        ("flat_memory", "nano"),
    ]
