"""Candidates among very many classes: those whose vectors lie nearest to a query, found by FAISS.

Vectors are parted into lists, each about a centroid, and a query looks into the few lists that lie nearest to it.
So a class can be missed, but nothing else can go wrong: whoever asked scores the candidates again, exactly.

A partition says no more than which class is in which list. It stays of use when classes come and go, or when all
vectors have moved a little, and nothing that it says can do more harm than a missed class. Hence it is what is
kept on disk, and FAISS's own structures, whose reader trusts what it reads, are not.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

LISTS_FROM = 50_000  # vectors; below, all of them are looked at, which costs as little and misses nothing
PROBED, SCANNED = (
    (64, 128),
    32_768,
)  # lists that a query looks into: as many as hold so many vectors, within bounds
REBUILT = 0.3  # the share of classes that came or went, from which on lists are made anew
_PER_LIST = 100  # vectors, about
_MOST_LISTS = 2048
_SAMPLE, _ROUNDS = 32, 4  # of k-means: vectors per list, and how often they are shared out


def available() -> bool:
    """Whether FAISS is installed; without it every class is looked at."""
    return importlib.util.find_spec("faiss") is not None


def _faiss() -> Any:
    return importlib.import_module("faiss")


@dataclass(frozen=True)
class Partition:
    """Which class is in which list. Classes are told apart by digests of their names, not by their places."""

    digests: Tensor  # int64 [N]
    lists: Tensor  # int64 [N]
    centroids: Tensor  # float32 [L, D]: unit vectors
    changed: int = 0  # classes that came or went since the centroids were made

    @classmethod
    def fit(cls, names: Sequence[str], vectors: Tensor) -> Partition:
        """Lists of unit vectors [N, D], by spherical k-means on some of them."""
        count = max(1, min(len(vectors) // _PER_LIST, _MOST_LISTS))
        means = _faiss().Kmeans(
            vectors.shape[1],
            count,
            niter=_ROUNDS,
            spherical=True,
            max_points_per_centroid=_SAMPLE,
            min_points_per_centroid=1,
            seed=0,
        )
        means.train(vectors.numpy())
        centroids = torch.from_numpy(np.ascontiguousarray(means.centroids))
        return cls(digests(names), _nearest_list(centroids, vectors), centroids)

    def following(self, names: Sequence[str], vectors: Tensor) -> Partition:
        """For the classes that there are now: known ones stay in their lists, only new ones look for theirs."""
        wanted, (known, order) = digests(names), self.digests.sort()
        if not len(known) or self.centroids.shape[1] != vectors.shape[1]:
            return Partition.fit(names, vectors)
        places = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
        found = known[places] == wanted
        came = int((~found).sum())
        changed = self.changed + came + len(known) - int(found.sum())
        if changed > REBUILT * len(names):
            return Partition.fit(names, vectors)
        lists = self.lists[order[places]]
        lists[~found] = _nearest_list(self.centroids, vectors[~found])
        return Partition(wanted, lists, self.centroids, changed)

    def without_others(self, names: Sequence[str]) -> Partition:
        """Without classes that are not among these: their names leave no trace."""
        kept = torch.isin(self.digests, digests(names))
        changed = self.changed + int((~kept).sum())
        return Partition(self.digests[kept], self.lists[kept], self.centroids, changed)


class Search(Protocol):
    def nearest(self, queries: Tensor, count: int) -> Tensor:
        """[B, n]: of unit vectors [B, D] those nearest to each query, n different ones, the nearest first."""


def search(
    names: Sequence[str], vectors: Tensor, known: Partition | None = None
) -> tuple[Search, Partition | None]:
    """Among the unit vectors [N, D] of classes with these names; by lists, where they are many and FAISS is there.

    known: how they, or others, were parted before.
    """
    if len(vectors) < LISTS_FROM or not available():
        return Everywhere(vectors), None
    partition = known.following(names, vectors) if known else Partition.fit(names, vectors)
    return Lists(vectors, partition), partition


class Everywhere:
    """Looks at all vectors."""

    def __init__(self, vectors: Tensor):
        self.vectors = vectors

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        return (queries @ self.vectors.T).topk(count, dim=1).indices


class Lists:
    """Looks into the lists that lie nearest."""

    def __init__(self, vectors: Tensor, partition: Partition):
        faiss = _faiss()
        self.size = len(vectors)
        centroids = partition.centroids.contiguous().numpy()
        self._coarse = faiss.IndexFlatIP(centroids.shape[1])  # kept, for the index only borrows it
        self._coarse.add(centroids)
        half = faiss.ScalarQuantizer.QT_fp16
        self._index = faiss.IndexIVFScalarQuantizer(
            self._coarse, vectors.shape[1], len(centroids), half, faiss.METRIC_INNER_PRODUCT, False
        )
        self._index.is_trained = True  # half precision has nothing to learn, and the centroids are there
        numbers, lists = vectors.contiguous().numpy(), partition.lists.contiguous().numpy()
        self._index.add_core(len(numbers), faiss.swig_ptr(numbers), None, faiss.swig_ptr(lists))
        least, most = PROBED
        wanted = SCANNED * len(centroids) // len(vectors)
        self._index.nprobe = min(max(least, min(wanted, most)), len(centroids))

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        _, found = self._index.search(queries.contiguous().numpy(), count)
        places = torch.from_numpy(found)
        for row in (places < 0).any(dim=1).nonzero()[:, 0].tolist():  # lists looked into had fewer
            places[row] = self._filled(places[row])
        return places

    def _filled(self, places: Tensor) -> Tensor:
        """What is missing at the end of a row, as the first vectors that are not in it."""
        here = places[places >= 0]
        others = torch.arange(len(places) + len(here)).clamp(max=self.size - 1).unique()
        return torch.cat([here, others[~torch.isin(others, here)]])[: len(places)]


def _nearest_list(centroids: Tensor, vectors: Tensor) -> Tensor:
    parts = [(some @ centroids.T).argmax(dim=1) for some in vectors.split(2048)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def digests(names: Sequence[str]) -> Tensor:
    """int64 [N]: what stands for each name in a file that need not tell it."""
    drawn = b"".join(hashlib.sha256(name.encode()).digest()[:8] for name in names)
    return torch.from_numpy(np.frombuffer(drawn, dtype="<i8").astype(np.int64))
