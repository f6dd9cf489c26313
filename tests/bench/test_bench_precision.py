"""bf16 is a ratio only where the processor has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from protosteer.bench import precision
from protosteer.bench.subjects import small

pytestmark = pytest.mark.slow


def cpuinfo(monkeypatch: pytest.MonkeyPatch, text: str | None, platform: str = "linux") -> None:
    def read(path: Path, encoding: str) -> str:
        assert path == Path("/proc/cpuinfo")
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(precision.sys, "platform", platform)


@pytest.mark.parametrize(
    "text, native",
    [
        ("model name\t: A\nflags\t\t: fpu avx2 avx512_bf16\n\nflags\t\t: fpu\n", True),
        ("flags\t\t: amx_bf16 amx_tile\n", True),
        ("flags\t\t: avx avx2 avx512f\nbugs\t: amx_bf16\n", False),
        ("processor : 0\n", False),
        (None, False),
    ],
)
def test_native_bf16_is_read_off_the_flags(monkeypatch: pytest.MonkeyPatch, text: str, native: bool) -> None:
    cpuinfo(monkeypatch, text)
    assert precision.native_bf16() is native


def test_other_systems_are_taken_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo(monkeypatch, "flags : amx_bf16\n", platform="darwin")
    assert precision.native_bf16() is False


@pytest.mark.parametrize("native", [True, False])
def test_no_ratio_without_native_bf16(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(precision, "native_bf16", lambda: native)
    monkeypatch.setattr(precision, "measure", lambda repeats: f"{repeats} repeats")
    assert precision.run(3) == (["3 repeats"] if native else [])


def test_both_sides_have_the_same_weights_and_their_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, seen = small(depth=2), []
    begin = precision.ours

    def ours(batch):
        seen.append((batch.backbone.precision, batch.backbone.vit is backbone.vit))
        return begin(batch)

    monkeypatch.setattr(precision, "ours", ours)
    ratio = precision.measure(1, backbone, images=4)
    assert seen == [("fp32", True), ("bf16", True)]
    assert ratio.name == "bf16" and ratio.value > 0 and ratio.target == 1.5
    assert [note.split(":")[0] for note in ratio.notes] == ["fp32", "bf16"]
