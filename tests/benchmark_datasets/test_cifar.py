"""CIFAR's official pickles and records, and pickles that want more than arrays."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from expect import expect_error
from protosteer.data.datasets.cifar import cifar_files, read_cifar, read_cifar100
from protosteer.data.datasets.registry import open_dataset
from protosteer.errors import DataError
from protosteer.streams import StreamOptions, open_stream
from set_toys import READING, SMALL, write_cifar100


def images_of(rows):
    return torch.from_numpy(rows.reshape(-1, 3, 32, 32))


def test_pixels_labels_and_names(tmp_path):
    write_cifar100(tmp_path)
    rows = pickle.loads((tmp_path / "train").read_bytes())["data"]
    pixels, labels, names = read_cifar100(tmp_path, "train")
    assert pixels.shape == (10, 3, 32, 32) and pixels.dtype == torch.uint8
    assert pixels[4, 2, 3, 7] == rows[4, 2 * 1024 + 3 * 32 + 7]
    assert labels.tolist() == list(range(10)) and names[99] == "class 99"


def test_a_pickle_that_would_run_something_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'attacked'}",)

    (tmp_path / "train").write_bytes(pickle.dumps({"data": Attack()}))
    with expect_error("damaged-file", DataError):
        read_cifar100(tmp_path, "train")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps({"data": np.zeros((10, 3072), np.uint8), "labels": [0] * 10}),
        pickle.dumps({"data": np.zeros((10, 3072), np.uint8), "fine_labels": [0] * 9}),
    ],
)
def test_damaged_and_missing_files_are_named(tmp_path, content):
    (write_cifar100(tmp_path) / "test").write_bytes(content)
    with expect_error("damaged-file", DataError):
        read_cifar100(tmp_path, "test")
    (tmp_path / "test").unlink()
    with expect_error("missing-file", DataError):
        read_cifar100(tmp_path, "test")


ROWS = b"\x80\x02}U\x04data"
HOSTILE = {
    "ndarray called": ROWS + b"cnumpy\nndarray\nK\x01\x85U\x01OU\x08AAAAAAAA\x87Rs.",
    "object dtype": ROWS + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    b"(K\x01K\x01\x85cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R\x89U\x08AAAAAAAAtbs.",
    "dtype with fields": ROWS + b"cnumpy\ndtype\nU\x02u1\x85R(K\x03U\x01O}}K\x08K\x01K?tbs.",
    "longer than the file": ROWS + b"cnumpy.core.multiarray\n_reconstruct\n)R"
    b"(K\x01J\xff\xff\xff\x7fM\x00\x0c\x86cnumpy\ndtype\nU\x02u1\x85R\x89U\x08AAAAAAAAtbs.",
    "a class built upon": ROWS + b"cnumpy\ndtype\n}U\x01aK\x01sbs.",
    "memo of four thousand million": ROWS + b"r\xff\xff\xff\xfes.",
    "nothing to take": b"\x80\x02\x87.",
    "a mark that is not there": b"\x80\x02t.",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused(tmp_path, content):
    (write_cifar100(tmp_path) / "train").write_bytes(content)
    with expect_error("damaged-file", DataError):
        read_cifar100(tmp_path, "train")


def test_lists_within_lists_do_not_multiply(tmp_path):
    """Each of 40 lists holds the one before twice: for numpy it would be 2^40 numbers."""
    nested: list = [0]
    for _ in range(40):
        nested = [nested, nested]
    table = {"data": np.zeros((2, 3072), np.uint8), "fine_labels": nested}
    (write_cifar100(tmp_path) / "train").write_bytes(pickle.dumps(table, protocol=2))
    with expect_error("damaged-file", DataError):
        read_cifar100(tmp_path, "train")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol_is_read(tmp_path, protocol):
    rows = np.arange(3 * 3072).astype(np.uint8).reshape(3, 3072)
    table = {"data": np.asfortranarray(rows), "fine_labels": np.array([1, 70, 9]), "filenames": ["a"] * 3}
    (write_cifar100(tmp_path) / "train").write_bytes(pickle.dumps(table, protocol=protocol))
    pixels, labels, _ = read_cifar100(tmp_path, "train")
    assert torch.equal(pixels, images_of(rows)) and labels.tolist() == [1, 70, 9]


def write_cifar10(path, binary):
    """Three images per batch, labelled batch number, 0, 9."""
    every = []
    for batch in range(1, 7):
        rows = np.random.default_rng(batch).integers(0, 256, (3, 3072), dtype=np.uint8)
        labels = [batch, 0, 9]
        name = f"data_batch_{batch}" if batch < 6 else "test_batch"
        if binary:
            records = np.concatenate([np.array(labels, np.uint8)[:, None], rows], axis=1)
            (path / f"{name}.bin").write_bytes(records.tobytes())
        else:
            table = {"data": rows, "labels": labels, "batch_label": "x", "filenames": ["a.png"] * 3}
            (path / name).write_bytes(pickle.dumps(table, protocol=2))
        every.append(rows)
    names = [f"kind {i}" for i in range(10)]
    if binary:
        (path / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    else:
        (path / "batches.meta").write_bytes(pickle.dumps({"label_names": names, "num_vis": 3072}, protocol=2))
    return np.concatenate(every), names


@pytest.mark.parametrize("binary", [False, True])
def test_cifar10_batches_follow_their_numbers(tmp_path, binary):
    assert cifar_files(tmp_path, 10) is None
    rows, names = write_cifar10(tmp_path, binary)
    pixels, labels, classes = read_cifar(tmp_path, "train", 10)
    assert classes == names and labels.tolist() == [1, 0, 9, 2, 0, 9, 3, 0, 9, 4, 0, 9, 5, 0, 9]
    assert torch.equal(pixels, images_of(rows[:15]))
    pixels, labels, _ = read_cifar(tmp_path, "test", 10)
    assert labels.tolist() == [6, 0, 9] and torch.equal(pixels, images_of(rows[15:]))
    assert len(cifar_files(tmp_path, 10) or []) == 7 and cifar_files(tmp_path, 100) is None


def test_cifar100_records_have_a_coarse_label_first(tmp_path):
    rows = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    labels = np.array([[19, 7], [19, 99], [19, 0], [19, 7]], np.uint8)
    records = np.concatenate([labels, rows], axis=1).tobytes()
    for split in ("train", "test"):
        (tmp_path / f"{split}.bin").write_bytes(records)
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"class {i}" for i in range(100)))
    pixels, labels, names = read_cifar100(tmp_path, "train")
    assert labels.tolist() == [7, 99, 0, 7] and names[7] == "class 7" and torch.equal(pixels, images_of(rows))
    found = [path.name for path in cifar_files(tmp_path, 100) or []]
    assert found == ["train.bin", "test.bin", "fine_label_names.txt"]
    (tmp_path / "train.bin").write_bytes(records[:-1])
    with expect_error("damaged-file", DataError):
        read_cifar100(tmp_path, "train")


def test_python_files_come_first(tmp_path):
    write_cifar10(tmp_path, binary=True)
    write_cifar10(tmp_path, binary=False)
    assert (cifar_files(tmp_path, 10) or [])[0].name == "data_batch_1"
    for path in tmp_path.glob("*.bin"):
        path.write_bytes(b"damaged")
    assert len(read_cifar(tmp_path, "train", 10)[0]) == 15


@pytest.mark.slow
def test_the_real_files(shared, tmp_path):
    archive, tool = shared / "data" / "cifar100_lossless.zip", shared / "data" / "unpack_cifar.py"
    if not archive.exists():
        pytest.skip(f"no CIFAR-100: {archive} does not exist")
    subprocess.run([sys.executable, tool, archive, tmp_path], check=True, capture_output=True)
    dataset = open_dataset("cifar100", tmp_path, READING)
    assert dataset.checksums["test"] == "md5:f0ef6b0ae62326f3e7ffdfab6717acfc" and len(dataset.checksums) == 3
    assert len(dataset.train.images) == 50000 and dataset.train.labels.bincount().tolist() == [500] * 100
    assert len(dataset.test.images) == 10000 and dataset.test.labels.bincount().tolist() == [100] * 100
    assert dataset.classes[0] == "apple" and dataset.classes[99] == "worm"
    options = StreamOptions("seed:1993", base=50, increment=10, train_per_class=20, test_per_class=10)
    stream = open_stream("split-cifar100", options, SMALL, tmp_path)
    assert [len(t.classes) for t in stream] == [50, 10, 10, 10, 10, 10]
    assert [len(t.train) for t in stream] == [1000] + [200] * 5 and [len(t.test) for t in stream] == [500] + [100] * 5
    assert stream.classes == [dataset.classes[i] for i in np.random.RandomState(1993).permutation(100)]
    assert stream[0].train.pixels([0, 999]).shape == (2, 3, 32, 32) and json.dumps(stream.about)
    with (tmp_path / "cifar-100-python" / "test").open("r+b") as file:
        file.seek(5000)
        file.write(b"\0\0\0\0")
    with pytest.raises(DataError, match="test has md5 .*official file has f0ef6b0a.*datasets get cifar100"):
        open_dataset("cifar100", tmp_path, READING)
