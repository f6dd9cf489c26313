"""Whatever reads a file refuses a pipe at once, on which it would wait for ever."""

import gzip
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expect import expect_error
from protosteer.backbones.checkpoint_io import read_checkpoint
from protosteer.data.class_folders import read_list
from protosteer.data.datasets import idx
from protosteer.data.datasets.cifar import read_cifar100
from protosteer.data.datasets.svhn import read_svhn
from protosteer.data.downloads import unpack
from protosteer.data.image_files import image_files, opened, text_lines
from protosteer.data.images import FileImages
from protosteer.errors import DataError, ProtosteerError
from protosteer.settings import Settings
from set_toys import SMALL

READERS: dict[str, Callable[[Path], object]] = {
    "image": lambda path: FileImages([path], SMALL).pixels([0]),
    "images": image_files,
    "lines": text_lines,
    "list": read_list,
    "idx": idx.content,
    "svhn": read_svhn,
    "train": lambda path: read_cifar100(path.parent, "train"),
    "settings": Settings.from_toml,
    "w.pth": read_checkpoint,
    "w.npz": read_checkpoint,
    "w.safetensors": read_checkpoint,
    "archive": lambda path: unpack(path, "set", path.parent / "out"),
}


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("name", READERS)
def test_pipes(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ProtosteerError, match=name):
        READERS[name](tmp_path / name)


def test_formats_that_need_another_program_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    with expect_error("unreadable-image", DataError), opened(tmp_path / "a.png"):
        pass


def test_a_packed_idx_file_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "MAX_UNZIPPED", 999)
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(1000)))
    with expect_error("damaged-file", DataError):
        idx.content(tmp_path / "a.gz")
    monkeypatch.setattr(idx, "MAX_UNZIPPED", 1000)
    assert len(idx.content(tmp_path / "a.gz")) == 1000
