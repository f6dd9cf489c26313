"""What predicting a million images costs: measured on this machine, on paper for GPUs.

    python tools/cost_table.py deit_tiny_patch16_224 --weights FILE

One thread embeds images that are in memory; its processor time is what counts, so that busy neighbours do not. Decoding
of JPEGs is measured beside it. Prices and what a GPU does are assumptions, each a number below: put in your own.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from protosteer.backbones import Backbone

CORE_HOUR = 0.04  # dollars, of one virtual core in a cloud
GPU_HOUR = 2.0  # dollars, of one A100
GPU_FLOPS = 125e12  # bf16, 40 % of an A100's peak
CLUSTER = 64  # GPUs
DECODE_CORES = 8  # that come with each GPU
IMAGES, REPEATS = 16, 5


def seconds_each(work: Callable[[], object]) -> float:
    """Processor seconds of one image, by the median of some repeats."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append((time.process_time() - began) / IMAGES)
    return statistics.median(times)


def flop(backbone: Backbone) -> float:
    """Of one plain pass: every weight of a layer once per token, and attention."""
    config = backbone.vit.config
    tokens = 1 + config.registers + config.patches
    layer = tokens * (8 * config.dim**2 + 4 * config.dim * config.mlp_dim) + 4 * tokens**2 * config.dim
    return float(config.depth * layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone")
    parser.add_argument("--weights", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    backbone = Backbone.load(options.backbone, options.weights)
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    photo = Image.fromarray(noise).resize((640, 480), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=90)
    size = backbone.image_size
    pixels = torch.zeros(IMAGES, 3, size, size, dtype=torch.uint8)
    embed = seconds_each(lambda: backbone.embed_pixels(pixels))
    decode = seconds_each(
        lambda: [backbone.preprocessing.to_canvas(Image.open(io.BytesIO(file.getvalue()))) for _ in range(IMAGES)]
    )
    core = 1 / (embed + decode)
    gpu = min(GPU_FLOPS / flop(backbone), DECODE_CORES / decode)
    limit = "decoding" if gpu * decode >= DECODE_CORES * 0.999 else "the GPU"
    rows = [
        ("one core (measured)", core, CORE_HOUR, "the backbone" if embed > decode else "decoding"),
        ("one GPU, 8 cores (on paper)", gpu, GPU_HOUR, limit),
        (f"{CLUSTER} GPUs (on paper)", gpu * CLUSTER, GPU_HOUR * CLUSTER, limit),
    ]
    print(f"{options.backbone}: {embed * 1e3:.1f} ms a pass, {decode * 1e3:.1f} ms to decode 640 x 480, one thread")
    print("| | images a second | hours for a million | dollars for a million | limited by |")
    print("|---|--:|--:|--:|---|")
    for name, rate, price, bound in rows:
        hours = 1e6 / rate / 3600
        print(f"| {name} | {rate:,.0f} | {hours:.3g} | {hours * price:.2f} | {bound} |")


if __name__ == "__main__":
    main()
