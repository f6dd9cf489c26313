"""Any bytes are one of CIFAR's pickles, or are refused; so are those of the idx format."""

import gzip
import pickle
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from targets import TARGETS, Target, try_out

from protosteer.data.datasets.cifar import read_cifar100
from protosteer.data.datasets.idx import read_idx
from protosteer.errors import DataError
from set_toys import idx_bytes, write_cifar100

pytestmark = pytest.mark.slow


@cache
def pickles() -> list[bytes]:
    rows = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
    table = {"data": rows, "fine_labels": [3, 70], "coarse_labels": [0, 1], "filenames": ["a.png", "b.png"]}
    # As Python 2 wrote it: strings of bytes, and an array that is filled from one.
    old = (
        b"\x80\x02}q\x01(U\x0bfine_labelsq\x02]q\x03K\x07aU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05"
        b"cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01"
        b"\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00"
        + bytes(3072)
        + b"tbu."
    )
    return [old, *(pickle.dumps(table, protocol=protocol) for protocol in (2, 4, 5))]


def check_cifar(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        (write_cifar100(Path(folder), images=1) / "train").write_bytes(data)
        try:
            pixels, labels, _ = read_cifar100(folder, "train")
        except DataError as error:
            assert "\n" not in str(error)
        else:
            assert pixels.shape == (len(labels), 3, 32, 32) and pixels.nbytes <= len(data)


def check_idx(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "idx.gz" if data[:2] == b"\x1f\x8b" else "idx")
        path.write_bytes(data)
        try:
            read_idx(path, 3)
        except DataError as error:
            assert "\n" not in str(error)


@cache
def idx_files() -> list[bytes]:
    plain = idx_bytes(np.arange(3 * 28 * 28).astype(np.uint8).reshape(3, 28, 28))
    return [plain, gzip.compress(plain)]


TARGETS["cifar"] = Target(pickles, check_cifar)
TARGETS["idx"] = Target(idx_files, check_idx)


def test_cifar() -> None:
    try_out("cifar", examples=150)


def test_idx() -> None:
    try_out("idx", examples=150)


def test_the_seeds_are_read() -> None:
    for data in pickles():
        with TemporaryDirectory() as folder:
            (write_cifar100(Path(folder), images=1) / "train").write_bytes(data)
            assert len(read_cifar100(folder, "train")[1])
