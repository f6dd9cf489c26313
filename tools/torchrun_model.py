"""What a training step by many GPUs would cost, on paper: nothing here was measured.

    python tools/torchrun_model.py

The ranks share the backbone's passes; each computes neck, loss and optimiser for the whole batch. A step has two
collective operations: embeddings are gathered, and the prompt's gradients are summed. Every assumption is a number
below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DIM, LAYERS, PROMPT, HIDDEN = 768, 12, 1, 2048  # ViT-B/16, the defaults of Settings
IMAGE_FLOP = 2 * 35e9  # forward, and backward to the prompt: weights are frozen and get no gradient
GPU_FLOPS = 125e12  # of one GPU, bf16, 40 % of an A100's peak
NECK_FLOP = 6 * (2 * DIM * HIDDEN + HIDDEN**2)  # for each image, float32
NECK_FLOPS = 15e12
SERIAL = 2e-3  # seconds: launching the kernels of neck, loss and optimiser


@dataclass(frozen=True)
class Cluster:
    name: str
    gpus: int
    bandwidth: float  # bytes a second into and out of a rank
    latency: float  # seconds of one nccl operation


CLUSTERS = [
    Cluster("8 GPUs, one node, NVLink", 8, 150e9, 20e-6),
    Cluster("64 GPUs, 8 nodes, 200 Gb/s", 64, 20e9, 60e-6),
]


def step(batch: int, cluster: Cluster | None) -> tuple[float, float, float, float]:
    """Seconds of the backbone, of neck and loss, and of communication; bytes into and out of a rank."""
    neck = SERIAL + batch * NECK_FLOP / NECK_FLOPS
    gpus = cluster.gpus if cluster else 1
    backbone = math.ceil(batch / gpus) * IMAGE_FLOP / GPU_FLOPS
    if cluster is None:
        return backbone, neck, 0.0, 0.0
    embeddings = 4 * (batch - math.ceil(batch / gpus)) * DIM
    prompt = 4 * LAYERS * PROMPT * DIM
    num_bytes = embeddings + 2 * prompt
    return backbone, neck, 2 * cluster.latency + num_bytes / cluster.bandwidth, num_bytes


def main() -> None:
    print("| | batch | images each | MB a step | backbone ms | neck ms | messages ms | speed-up |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for cluster in CLUSTERS:
        for batch in (256, 2048):
            single_seconds = sum(step(batch, None)[:3])
            backbone, neck, messages, num_bytes = step(batch, cluster)
            parts = " | ".join(f"{1000 * part:.1f}" for part in (backbone, neck, messages))
            faster = single_seconds / (backbone + neck + messages)
            images_each = math.ceil(batch / cluster.gpus)
            print(f"| {cluster.name} | {batch} | {images_each} | {num_bytes / 1e6:.2f} | {parts} | {faster:.1f} |")


if __name__ == "__main__":
    main()
