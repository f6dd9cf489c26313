"""Nearest-neighbour search among the vectors of very many classes: exact, or by FAISS's inverted lists.

Inverted lists (IVF) group the vectors around centroids; a query scans only the lists whose centroids are nearest.
The search may miss a class but returns no wrong scores: the caller scores the candidates exactly.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class IVFOptions:
    """How vectors are grouped into lists and how many lists a query scans."""

    min_vectors: int = 50_000  # below, exact search is as fast
    vectors_per_list: int = 100
    max_lists: int = 2048
    kmeans_samples_per_list: int = 32
    kmeans_rounds: int = 4
    nprobe_range: tuple[int, int] = (64, 128)  # fewest and most lists that a query scans
    target_scanned: int = 32_768  # vectors that a query scans, within these bounds


class Search(Protocol):
    """Finds the vectors nearest to a query."""

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        """Find rows [B, count] of the distinct vectors with the greatest dot product to queries [B, D], greatest first."""


def faiss_available() -> bool:
    """Return whether FAISS is installed; without it every search is exact."""
    return importlib.util.find_spec("faiss") is not None


def build_search(vectors: Tensor, options: IVFOptions | None = None) -> Search:
    """Build a search among unit vectors [N, D]: by lists where they are many and FAISS is installed."""
    options = options or IVFOptions()
    if len(vectors) < options.min_vectors or not faiss_available():
        return ExactSearch(vectors)
    return IVFSearch(vectors, options)


class ExactSearch:
    """Compares a query with all vectors [N, D]."""

    def __init__(self, vectors: Tensor):
        self.vectors = vectors

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        """See `Search.nearest`."""
        return (queries @ self.vectors.T).topk(count, dim=1).indices


class IVFSearch:
    """Compares a query with the vectors [N, D] of the nearest lists, in half precision."""

    def __init__(self, vectors: Tensor, options: IVFOptions):
        faiss: Any = importlib.import_module("faiss")
        self.size, dim = len(vectors), vectors.shape[1]
        rows = vectors.contiguous().numpy()
        lists = max(1, min(len(rows) // options.vectors_per_list, options.max_lists))
        sizes = {"min_points_per_centroid": 1, "max_points_per_centroid": options.kmeans_samples_per_list}
        kmeans = faiss.Kmeans(dim, lists, niter=options.kmeans_rounds, spherical=True, seed=0, **sizes)
        kmeans.train(rows)
        self._centroids = faiss.IndexFlatIP(dim)  # the index keeps no reference to it
        self._centroids.add(kmeans.centroids)
        quantizer, metric = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        self._index = faiss.IndexIVFScalarQuantizer(self._centroids, dim, lists, quantizer, metric, False)
        self._index.is_trained = True  # half precision has nothing to learn
        self._index.add(rows)
        min_nprobe, max_nprobe = options.nprobe_range
        nprobe = options.target_scanned * lists // len(rows)
        self._index.nprobe = min(max(min_nprobe, min(nprobe, max_nprobe)), lists)

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        """See `Search.nearest`. If the scanned lists hold fewer vectors, the first vectors not found fill the row."""
        rows = torch.from_numpy(self._index.search(queries.contiguous().numpy(), count)[1])
        for i in (rows < 0).any(dim=1).nonzero()[:, 0].tolist():
            hits = rows[i][rows[i] >= 0]
            fill = torch.arange(min(count + len(hits), self.size))
            rows[i] = torch.cat([hits, fill[~torch.isin(fill, hits)]])[:count]
        return rows
