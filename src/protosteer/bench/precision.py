"""Our training step in bfloat16 (autocast) against float32.

It pays only where the processor multiplies bfloat16 itself. Elsewhere each number is widened first, which is slower
than float32: there is no ratio to reach then, but `measure` still tells how much slower.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from protosteer.backbones import Backbone
from protosteer.bench.subjects import vit_tiny
from protosteer.bench.timing import Ratio, interleaved
from protosteer.bench.training import BATCH, Batch, milliseconds, ours

TARGET = 1.5
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def native_bf16() -> bool:
    """Whether the processor has instructions for bfloat16, as far as Linux tells; False on other systems."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not BF16_FLAGS.isdisjoint(flags)


def run(repeats: int) -> list[Ratio]:
    return [measure(repeats)] if native_bf16() else []


def measure(repeats: int, backbone: Backbone | None = None, images: int = BATCH) -> Ratio:
    """Whatever the processor has. backbone: None for a ViT-Ti/16."""
    subject = backbone or vit_tiny()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sides = {kind: ours(Batch.random(_in(subject, kind), images)) for kind in ("fp32", "bf16")}
        times = interleaved(sides, repeats)
    each = {kind: milliseconds(seconds, images) for kind, seconds in times.items()}
    notes = [f"{kind}: {1000 / value:.1f} images/s, {value:.2f} ms an image" for kind, value in each.items()]
    about = f"training step, {subject.name}, batch of {images}: fp32 / bf16"
    return Ratio.of("bf16", about, times["fp32"], times["bf16"], TARGET, notes)


def _in(backbone: Backbone, precision: str) -> Backbone:
    """The same weights."""
    about = (backbone.name, backbone.vit, backbone.preprocessing, backbone.fingerprint)
    return Backbone(*about, precision=precision)
