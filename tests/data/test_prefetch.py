"""Reading ahead: the same pixels in the same order, errors in their place, and nothing left running."""

import random
import threading
import time

import pytest
import torch
from PIL import Image
from torch import Tensor

from expect import expect_error
from protosteer.data.decode_cache import DecodedCache
from protosteer.data.images import ArrayImages, Chosen, FileImages, ImageSet, Joined, LazyImages
from protosteer.data.prefetch import prefetched
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, SettingsError

SMALL = Preprocessing(8, (0.5,) * 3, (0.5,) * 3)
BATCHES = [[3, 1], [0], [4, 4, 2], [5], [1, 0]]


class Files(FileImages):
    """Files that take their time and keep a list of what was asked for, and in which thread."""

    def __init__(self, paths):
        super().__init__(paths, SMALL)
        self.asked: list[list[int]] = []
        self.threads: set[str] = set()

    def pixels(self, rows) -> Tensor:
        self.asked.append(list(rows))
        self.threads.add(threading.current_thread().name)
        time.sleep(random.random() * 0.005)
        return super().pixels(rows)


@pytest.fixture
def files(tmp_path) -> Files:
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for i, path in enumerate(paths):
        Image.new("RGB", (9, 9), (40 * i, 10, 20)).save(path)
    return Files(paths)


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def in_background(images: ImageSet) -> bool:
    """Whether a thread is at work once the first batch has come."""
    batches = prefetched(images, [[0]] * 5)
    next(batches)
    found = bool(running())
    batches.close()
    return found


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@pytest.mark.parametrize("ahead", [1, 2, 10])
def test_same_pixels_in_the_same_order(files, ahead):
    direct = [files.pixels(rows) for rows in BATCHES]
    files.threads.clear()
    for batches in (BATCHES, [torch.tensor(rows) for rows in BATCHES]):
        fetched = list(prefetched(files, batches, ahead))
        assert len(fetched) == len(direct) and all(torch.equal(*pair) for pair in zip(fetched, direct, strict=True))
    assert files.threads and all(name.startswith("prefetch") for name in files.threads) and not running()


def test_works_while_the_caller_does_and_never_too_far_ahead(files):
    batches = prefetched(files, [[row % 6] for row in range(12)], ahead=3)
    assert not files.asked and not running()  # nothing happens before the first batch is asked for
    for taken in range(1, 10):
        next(batches)
        wait_until(lambda taken=taken: len(files.asked) == taken + 3)
        time.sleep(0.02)
        assert len(files.asked) == taken + 3
    batches.close()


def test_no_batches(files):
    assert list(prefetched(files, [])) == [] and not running()


@pytest.mark.parametrize("ahead", [1, 3])
def test_an_error_comes_at_its_own_batch(files, ahead):
    files.paths[4].write_bytes(b"no image")
    batches = prefetched(files, BATCHES, ahead)
    assert len(next(batches)) == 2 and len(next(batches)) == 1
    with expect_error("unreadable-image", DataError):
        next(batches)
    assert not running()
    with pytest.raises(StopIteration):
        next(batches)


def test_closing_early_stops_the_thread(files):
    before = threading.active_count()
    batches = prefetched(files, [[0]] * 100, ahead=50)
    next(batches)
    assert running()
    batches.close()
    assert not running() and threading.active_count() == before and len(files.asked) < 100
    asked = len(files.asked)
    time.sleep(0.02)
    assert len(files.asked) == asked


def test_leaving_the_loop_by_an_error_stops_the_thread(files):
    def consume() -> None:
        for pixels in prefetched(files, [[0]] * 100):
            raise RuntimeError(f"no use for {len(pixels)}")

    with pytest.raises(RuntimeError, match="no use for 1"):
        consume()
    wait_until(lambda: not running())


def test_only_files_are_read_in_the_background(files):
    array = ArrayImages(torch.zeros(6, 3, 8, 8, dtype=torch.uint8))
    lazy = LazyImages(6, lambda row: Image.new("RGB", (8, 8)), SMALL)
    assert in_background(files) and in_background(Chosen(Chosen(files, [5, 1]), [1, 0]))
    assert in_background(DecodedCache(files)) and in_background(DecodedCache(Chosen(files, [5, 1])))
    for other in (array, lazy, DecodedCache(array), DecodedCache(lazy), Joined([array, Chosen(array, [2])])):
        assert not in_background(other)


def test_a_dataset_that_draws_random_numbers_stays_seeded():
    def load(row: int) -> Image.Image:
        return Image.new("RGB", (8, 8), (int(torch.randint(256, ())), row, 0))

    def run(reader) -> list[int]:
        torch.manual_seed(0)
        return [int(pixels.sum()) + int(torch.randint(256, ())) for pixels in reader]

    lazy = LazyImages(6, load, SMALL)
    assert run(prefetched(lazy, BATCHES)) == run(lazy.pixels(rows) for rows in BATCHES)


@pytest.mark.parametrize(("device", "pins"), [("cuda", True), ("cpu", False), ("mps", False), (None, False)])
def test_pinned_memory_for_cuda_alone(files, device, pins, monkeypatch):
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    for images in (files, ArrayImages(torch.zeros(6, 3, 8, 8, dtype=torch.uint8))):
        pinned.clear()
        list(prefetched(images, BATCHES, device=device and torch.device(device)))
        assert len(pinned) == (len(BATCHES) if pins else 0)


def test_ahead_is_checked_at_once(files):
    with expect_error("bad-setting", SettingsError):
        prefetched(files, BATCHES, ahead=0)
