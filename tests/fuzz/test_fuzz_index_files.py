"""Indexes beside a model that someone has changed and sealed again: left aside in one line, or they find classes."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from targets import TARGETS, Target, try_out
from test_fuzz_models import mutate

from protosteer.model import index_file
from protosteer.search.ivf import Lists, Partition

NAMES = [str(number) for number in range(300)]
VECTORS = F.normalize(torch.randn(300, 8, generator=torch.Generator().manual_seed(0)), dim=1)


@functools.cache
def seeds() -> Sequence[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        index_file.write(Path(folder, "m"), Partition.fit(NAMES, VECTORS), "backbone")
        return [index_file.beside(Path(folder, "m")).read_bytes()]


def check(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = Path(folder, "m")
        index_file.beside(path).write_bytes(data)
        known = index_file.read(path, "backbone")
        index_file.follow(path, NAMES[:200])
    if known is None:
        assert len(caught) == 1 and "\n" not in str(caught[0].message)
        return
    found = Lists(VECTORS, known.following(NAMES, VECTORS)).nearest(VECTORS[:20], 30)
    assert int(found.min()) >= 0 and int(found.max()) < 300
    assert all(len(set(row)) == 30 for row in found.tolist())


TARGETS["indexes"] = Target(seeds, check, mutate)


def test_indexes() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    try_out("indexes", examples=200)
