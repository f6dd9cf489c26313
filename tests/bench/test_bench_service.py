"""The load generator: that it sends what it says, notices what goes wrong, and measures a real service."""

from __future__ import annotations

import sys
from email import message_from_bytes
from pathlib import Path

import pytest

from protosteer.errors import ProtosteerError

pytest.importorskip("fastapi", reason="the service's extra is not installed")

from protosteer.bench import service

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(service.CASES, "nano", (*service.CASES["nano"][:3], 32))


def test_requests_are_forms_with_the_files(tmp_path: Path) -> None:
    files = service.image_files("nano", tmp_path)[:5]
    _, body, _ = service.forms(files, 2)
    head = f"Content-Type: {service._HEADERS['Content-Type']}\r\n\r\n".encode()
    form = message_from_bytes(head + body).get_payload()
    assert [part.get_filename() for part in form] == [file.name for file in files[2:4]]
    assert [part.get_payload(decode=True) for part in form] == [file.read_bytes() for file in files[2:4]]


def test_throughput_of_a_real_service(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    drive = service.drive

    def counted(address: str, forms: list[bytes], clients: int) -> list[float]:
        sent.append((len(forms), clients))
        return drive(address, forms, clients)

    monkeypatch.setattr(service, "drive", counted)
    one, several = service.throughput("service", "nano", 1, (1, 16))
    assert sorted(sent[:4]) == [(2, 64), (2, 64), (32, 64), (32, 64)]  # warm-up and one repeat
    assert sent[4:] == [(32, 1), (32, 8), (32, 64)]  # latencies
    assert [one.name, several.name] == ["service", "service_16"] and one.value > 0
    assert one.about.endswith("images a request: 1") and several.about.endswith("images a request: 16")
    assert [note.split(", p50")[0] for note in one.notes[1:]] == ["clients: 1", "clients: 8", "clients: 64"]


def test_an_error_ends_the_measurement() -> None:
    failed = pytest.raises(ProtosteerError, match="a request to the service failed: 4.. .+, {")
    with service.serving("nano") as address, failed:
        service.drive(address, [b"no form"], 1)
    with pytest.raises(ProtosteerError, match="the service cannot be reached, or hung up: "):
        service.drive(address, [b"too late"], 1)


def test_a_service_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = service.subprocess.Popen
    ended = [sys.executable, "-c", "raise SystemExit(1)"]
    monkeypatch.setattr(service.subprocess, "Popen", lambda command, **rest: popen(ended, **rest))
    message = "did not start; run -m protosteer.bench.service nano"
    with pytest.raises(ProtosteerError, match=message), service.serving("nano"):
        pass
