"""Centroids of one large class: scikit-learn's spectral clustering against the factored path.

Both sides do the whole job, from embeddings to means and deviations. The ratio is that of the less favourable width
of the embeddings.
"""

from __future__ import annotations

import tracemalloc
import warnings
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import SpectralClustering
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from protosteer.bench.timing import Ratio, Side, interleaved
from protosteer.method.prototypes import _factored_labels, centroids

TARGET = 20.0
IMAGES, GROUPS = 5000, 5
DIMENSIONS = (192, 768)


def run(repeats: int) -> list[Ratio]:
    ratios = [measure(IMAGES, dim, repeats) for dim in DIMENSIONS]
    worst = min(ratios, key=lambda ratio: ratio.value)
    worst.notes[:] = [note for ratio in ratios for note in ratio.notes]
    return [worst]


def measure(images: int, dim: int, repeats: int) -> Ratio:
    embeddings = cone(images, dim)
    labels, _, _ = reference(embeddings, GROUPS)  # these two calls are the warm-up as well
    peak = peak_bytes(embeddings, GROUPS)
    sides: dict[str, Side] = {
        "reference": lambda: reference(embeddings, GROUPS),
        "ours": lambda: centroids(embeddings, GROUPS),
    }
    times = interleaved(sides, repeats, warm_up=False)
    slow, quick = median(times["reference"]), median(times["ours"])
    notes = [
        f"width {dim}: scikit-learn {slow:.2f} s, ours {quick:.3f} s, {slow / quick:.1f} times faster; "
        f"agreement of the groups (adjusted Rand index) {agreement(labels, embeddings):.4f}",
        f"width {dim}: our arrays take at most {peak / 1e6:.0f} MB, one matrix of all pairs takes "
        f"{8 * images**2 / 1e6:.0f} MB",
    ]
    about = f"{GROUPS} centroids of a class of {images} images: scikit-learn / ours"
    return Ratio.of("centroids", about, times["reference"], times["ours"], TARGET, notes)


def cone(images: int, dim: int, groups: int = GROUPS, seed: int = 0) -> Tensor:
    """Embeddings as a ViT gives for one class: one common direction, overlapping groups around it."""
    random = np.random.default_rng(seed)
    common = random.normal(size=dim) / dim**0.5
    offsets = 0.7 * random.normal(size=(groups, dim)) / dim**0.5
    scales = np.arange(1, dim + 1) ** -0.5  # a few directions carry most of the noise
    noise = 0.5 * random.normal(size=(images, dim)) * scales / np.linalg.norm(scales)
    points = common + offsets[random.integers(groups, size=images)] + noise
    return torch.from_numpy(10 * points).float()


def reference(embeddings: Tensor, count: int) -> tuple[NDArray[np.int64], Tensor, Tensor]:
    """Labels [n], means [c, D] and deviations [c, D] by way of the n x n affinity."""
    points = embeddings.double().numpy()
    units = points / np.linalg.norm(points, axis=1, keepdims=True)
    affinity = np.maximum(units @ units.T, 1e-8)
    clustering = SpectralClustering(count, affinity="precomputed", assign_labels="discretize", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        labels: NDArray[np.int64] = clustering.fit_predict(affinity)
    groups = [embeddings[torch.from_numpy(labels == label)] for label in np.unique(labels)]
    means = torch.stack([group.mean(0) for group in groups])
    return labels, means, torch.stack([group.std(0, correction=0) for group in groups])


def agreement(labels: NDArray[np.int64], embeddings: Tensor) -> float:
    """Adjusted Rand index of the reference's groups and ours: 1 if they are the same."""
    ours = _factored_labels(embeddings.double().numpy(), GROUPS, "discretize", 0)
    return float(adjusted_rand_score(labels, ours))


def peak_bytes(embeddings: Tensor, count: int) -> int:
    """Of NumPy's arrays; torch has nothing larger than the embeddings on this path."""
    tracemalloc.start()
    try:
        centroids(embeddings, count)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
