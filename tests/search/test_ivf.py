"""Inverted lists against an exact search, on vectors few enough for both."""

import pytest
import torch
import torch.nn.functional as F

from protosteer.search.ivf import ExactSearch, IVFOptions, IVFSearch, build_search

pytest.importorskip("faiss", reason="faiss is not installed")

VECTORS = F.normalize(torch.randn(500, 16, generator=torch.Generator().manual_seed(0)), dim=1)
QUERIES = VECTORS[:50] + 0.01


def test_scanning_every_list_misses_nothing():
    search = IVFSearch(VECTORS, IVFOptions(vectors_per_list=20, nprobe_range=(500, 500)))
    assert torch.equal(search.nearest(QUERIES, 1), ExactSearch(VECTORS).nearest(QUERIES, 1))


def test_a_row_is_filled_up_where_the_scanned_lists_hold_too_few():
    search = IVFSearch(VECTORS, IVFOptions(vectors_per_list=20, nprobe_range=(1, 1)))
    found = search.nearest(QUERIES, 64)
    assert all(len({*row}) == 64 and min(row) >= 0 and max(row) < 500 for row in found.tolist())
    assert torch.equal(found[:, 0], ExactSearch(VECTORS).nearest(QUERIES, 1)[:, 0])
    assert torch.equal(search.nearest(QUERIES, 500).sort().values, torch.arange(500).expand(50, -1))


def test_lists_are_for_many_vectors():
    assert isinstance(build_search(VECTORS), ExactSearch)
    assert isinstance(build_search(VECTORS, IVFOptions(min_vectors=500)), IVFSearch)


def test_without_faiss_every_search_is_exact(monkeypatch):
    monkeypatch.setattr("protosteer.search.ivf.faiss_available", lambda: False)
    assert isinstance(build_search(VECTORS, IVFOptions(min_vectors=500)), ExactSearch)
