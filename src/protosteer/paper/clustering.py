"""Group one class's embeddings: spectral clustering by cosine similarity (paper), or k-means.

scikit-learn is imported where it is used, so that prediction need not wait for it.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from protosteer.util.spectral import factored_labels, unit_rows

DENSE_LIMIT = 1500  # images of one class up to which the n x n affinity is built
SIMILARITY_FLOOR = 1e-8  # affinities must not be negative

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def group_labels(points: Floats, count: int, method: str, assign: str, seed: int) -> Labels:
    """Assign each row of points [n, D] to one of `count` groups, [n]; more than `count` rows must differ."""
    if count == 1:
        return np.zeros(len(points), dtype=np.int64)
    if method == "kmeans":
        return kmeans_labels(points, count, seed)
    if len(points) <= DENSE_LIMIT:
        return spectral_labels(points, count, assign, seed)
    return factored_labels(points, count, assign, seed)


def kmeans_labels(points: Floats, count: int, seed: int) -> Labels:
    """Group points [n, D] by Euclidean k-means: labels [n]."""
    from sklearn.cluster import KMeans

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k-means may find fewer groups than `count`
        labels: Labels = KMeans(count, n_init=10, random_state=seed).fit_predict(points)
    return labels


def spectral_labels(points: Floats, count: int, assign: str, seed: int) -> Labels:
    """Group points [n, D] by spectral clustering; the affinity is the clipped cosine similarity: labels [n]."""
    from sklearn.cluster import SpectralClustering

    units = unit_rows(points)
    affinity = np.maximum(units @ units.T, SIMILARITY_FLOOR)  # [n, n]
    clustering = SpectralClustering(count, affinity="precomputed", assign_labels=assign, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of an unconnected graph: groups are still well defined
        labels: Labels = clustering.fit_predict(affinity)
    return labels
