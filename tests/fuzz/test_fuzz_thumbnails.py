"""Thumbnails beside a model that someone has changed and sealed again: left aside in one line, or JPEG files."""

import functools
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from targets import TARGETS, Target, try_out
from test_fuzz_models import mutate

from protosteer.model import thumbnails
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.model.thumbnails import Thumb
from protosteer.paper.prototypes import Centroids

pytestmark = pytest.mark.slow

JPEG = b"\xff\xd8\xff" + bytes(40)


@functools.cache
def memory() -> Memory:
    one = torch.ones(1, 4)
    values = Centroids(one, one, torch.ones(1, dtype=torch.int64))
    records = [ClassRecord(name, one, values, file_digests=torch.tensor([1, 2])) for name in ("ant", "bee")]
    return Memory([TaskRecord("spring", ClassTable.of(records), None)])


@functools.cache
def seeds() -> Sequence[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m")
        thumbnails.write(path, [Thumb(name, number, JPEG) for name in ("ant", "bee") for number in (1, 2)])
        return [thumbnails.beside(path).read_bytes()]


def check(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = Path(folder, "m")
        thumbnails.beside(path).write_bytes(data)
        found = thumbnails.read(path, memory())
        thumbnails.follow(path, Memory())
        assert not thumbnails.beside(path).exists()
    assert len(caught) <= 1 and all("\n" not in str(warning.message) for warning in caught)
    for name, digest, jpeg in found:
        assert name in ("ant", "bee") and digest in (1, 2) and jpeg.startswith(b"\xff\xd8\xff")


TARGETS["thumbs"] = Target(seeds, check, mutate)


def test_thumbs() -> None:
    try_out("thumbs", examples=200)
