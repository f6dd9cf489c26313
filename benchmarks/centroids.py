"""Centroids of one large class: scikit-learn's spectral clustering against the factored path.

Both sides do the whole job, from embeddings to means and deviations. Repeats are interleaved, so that
a busy machine slows both; the figure is the ratio of medians, for the less favourable dimension.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import SpectralClustering
from sklearn.metrics import adjusted_rand_score

from protosteer.prototypes import _factored_labels, centroids

IMAGES, GROUPS, TARGET = 5000, 5, 20
DIMENSIONS = (192, 768)


@dataclass(frozen=True)
class Case:
    """Seconds of each repeat, and how far the two clusterings agree (adjusted Rand index)."""

    dim: int
    reference: list[float]
    ours: list[float]
    agreement: float

    @property
    def ratio(self) -> float:
        return median(self.reference) / median(self.ours)

    @property
    def spread(self) -> float:
        """Greatest minus smallest ratio over the repeats."""
        ratios = [slow / quick for slow, quick in zip(self.reference, self.ours, strict=True)]
        return max(ratios) - min(ratios)


def cone(images: int, dim: int, groups: int = GROUPS, seed: int = 0) -> torch.Tensor:
    """Embeddings as a ViT gives for one class: one common direction, overlapping groups around it."""
    random = np.random.default_rng(seed)
    common = random.normal(size=dim) / dim**0.5
    offsets = 0.7 * random.normal(size=(groups, dim)) / dim**0.5
    scales = np.arange(1, dim + 1) ** -0.5  # a few directions carry most of the noise
    noise = 0.5 * random.normal(size=(images, dim)) * scales / np.linalg.norm(scales)
    points = common + offsets[random.integers(groups, size=images)] + noise
    return torch.from_numpy(10 * points).float()


def reference(embeddings: torch.Tensor, count: int) -> tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]:
    """Labels [n], means [c,D] and deviations [c,D] by way of the n x n affinity."""
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


def measure(dim: int, repeats: int) -> Case:
    embeddings = cone(IMAGES, dim)
    centroids(embeddings, GROUPS)  # first call pays for imports and threads
    slow, quick, agreement = [], [], 1.0
    for _ in range(repeats):
        begin = time.perf_counter()
        labels, _, _ = reference(embeddings, GROUPS)
        middle = time.perf_counter()
        centroids(embeddings, GROUPS)
        slow.append(middle - begin)
        quick.append(time.perf_counter() - middle)
        ours = _factored_labels(embeddings.double().numpy(), GROUPS, "discretize", 0)
        agreement = min(agreement, float(adjusted_rand_score(labels, ours)))
    return Case(dim, slow, quick, agreement)


def summary(cases: Sequence[Case]) -> dict[str, float]:
    worst = min(cases, key=lambda case: case.ratio)
    return {"value": worst.ratio, "target": TARGET, "spread": worst.spread}


def run(repeats: int = 3) -> dict[str, float]:
    return summary([measure(dim, repeats) for dim in DIMENSIONS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args()
    cases = [measure(dim, options.repeats) for dim in DIMENSIONS]
    if options.json:
        print(json.dumps({"ratios": {"centroids": summary(cases)}}))
        return
    for case in cases:
        print(
            f"n={IMAGES} D={case.dim}: scikit-learn {median(case.reference):.2f} s, "
            f"protosteer {median(case.ours):.3f} s, {case.ratio:.1f} times faster "
            f"(target {TARGET}, spread {case.spread:.1f}), adjusted Rand index {case.agreement:.4f}"
        )


if __name__ == "__main__":
    main()
