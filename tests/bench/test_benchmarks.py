"""Both sides of the scripts in benchmarks/ do the same work, and the scripts measure what they say."""

from collections import Counter
from email import message_from_bytes
from pathlib import Path

import pytest
from PIL import Image

import bench_decoding
import bench_matrix
from expect import expect_error
from vit_toys import small

pytestmark = pytest.mark.slow


def test_files_are_decoded_in_every_epoch_or_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_decoding, "PHOTOS", 4)
    monkeypatch.setattr(bench_decoding, "SIZE", (40, 30))
    settings = bench_decoding.SETTINGS.replace(epochs=3, batch_size=4, neck_hidden=16)
    monkeypatch.setattr(bench_decoding, "SETTINGS", settings)
    paths = bench_decoding.photographs(tmp_path, small())
    opened, learned, original = Counter(), [], Image.open
    monkeypatch.setattr(Image, "open", lambda f, **how: opened.update([str(f.name)]) or original(f, **how))
    learn_task = bench_decoding.learn_task

    def counted(*arguments):
        before = sum(opened.values())
        record = learn_task(*arguments)
        learned.append((sum(opened.values()) - before, record.prompt))
        return record

    monkeypatch.setattr(bench_decoding, "learn_task", counted)
    ratio = bench_decoding.measure("learn_photos", small(), paths, 1)
    assert sorted(decoded for decoded, _ in learned) == [4, 4, 20, 20]  # once, or keys, three epochs, values
    assert all(prompt.equal(learned[0][1]) for _, prompt in learned)
    assert ratio.name == "learn_photos" and ratio.value > 0


def test_both_protocols_give_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"vit_tiny": small, "TASKS": 5, "CLASSES": 3, "IMAGES": 12}.items():
        monkeypatch.setattr(bench_matrix, name, value)
    case = small(), *bench_matrix.subjects(small(), 5, 3, 12)
    run = bench_matrix.our_run(*case)
    assert bench_matrix.naive_matrix(*case) == run.matrix
    assert len({accuracy for row in run.matrix for accuracy in row}) > 3  # equality means something
    (ratio,) = bench_matrix.run(1)
    assert ratio.name == "matrix" and run.figures()["naive_forward_passes"] > run.figures()["forward_passes"]


def test_throughput_of_a_real_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the service's extra is not installed")
    import bench_service as service

    monkeypatch.setitem(service.CASES, "nano", (*service.CASES["nano"][:3], 32))
    files = service.image_files("nano", tmp_path)[:5]
    head = f"Content-Type: {service._HEADERS['Content-Type']}\r\n\r\n".encode()
    form = message_from_bytes(head + service.forms(files, 2)[1]).get_payload()
    assert [part.get_filename() for part in form] == [file.name for file in files[2:4]]
    assert [part.get_payload(decode=True) for part in form] == [file.read_bytes() for file in files[2:4]]
    one, several = service.throughput("service", "nano", 1, (1, 16))
    assert [one.name, several.name] == ["service", "service_16"] and one.value > 0
    assert [note.split(", p50")[0] for note in one.notes[1:]] == ["clients: 1", "clients: 8", "clients: 64"]
    with service.serving("nano") as address, expect_error("request-failed"):
        service.drive(address, [b"no form"], 1)
    with expect_error("service-unreachable"):
        service.drive(address, [b"too late"], 1)
