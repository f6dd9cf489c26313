"""DecodedCache canvases: the same pixels, each file decoded once, within the budget, whatever thread asks."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from PIL import Image

from expect import expect_error
from protosteer.data.decode_cache import BUDGET, DecodedCache, cache_decoded
from protosteer.data.images import ArrayImages, Chosen, FileImages, Joined
from protosteer.data.prefetch import prefetched
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

SMALL = Preprocessing(8, (0.5,) * 3, (0.5,) * 3)
BYTES = 3 * 8 * 8  # of one canvas
BATCHES = [[3, 1], [0], [4, 4, 2], [5], [1, 0]]


class Counted(FileImages):
    """Files that count how often each was decoded."""

    def __init__(self, paths):
        super().__init__(paths, SMALL)
        self.decoded: Counter[int] = Counter()

    def _decode(self, row):
        self.decoded[row] += 1
        return super()._decode(row)


@pytest.fixture
def files(tmp_path) -> Counted:
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for i, path in enumerate(paths):
        noise = np.random.default_rng(i).integers(0, 256, (9, 11, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    return Counted(paths)


@pytest.mark.parametrize("budget", [0, 1, 2 * BYTES, BUDGET])
def test_the_same_pixels_whatever_is_kept(files, budget):
    kept = DecodedCache(files, budget)
    assert len(kept) == 6 and kept.name(4) == files.name(4)
    for _ in range(3):
        for rows in (*BATCHES, range(6), torch.tensor([5, 0])):
            pixels = kept.pixels(rows)
            assert pixels.dtype == torch.uint8 and torch.equal(pixels, files.pixels(rows))


def test_each_file_is_decoded_once_and_only_when_asked_for(files):
    kept = DecodedCache(files)
    kept.pixels([4, 4, 2])
    assert files.decoded == {4: 1, 2: 1} and kept.cached_bytes == 2 * BYTES
    for _ in range(3):
        kept.pixels(range(6))
    assert files.decoded == dict.fromkeys(range(6), 1) and kept.cached_bytes == 6 * BYTES


def test_beyond_the_budget_files_are_decoded_again(files):
    kept = DecodedCache(files, 3 * BYTES - 1)
    for _ in range(4):
        kept.pixels([5, 3, 1, 1])
        kept.pixels([0])
    assert files.decoded == {5: 1, 3: 1, 1: 4, 0: 4} and kept.cached_bytes == 2 * BYTES
    held = sum(canvas.untyped_storage().nbytes() for canvas in kept._canvases.values())
    assert held == kept.cached_bytes, "a batch lives on behind its rows"


def test_what_the_caller_does_to_a_batch_is_not_kept(files):
    kept, true = DecodedCache(files), files.pixels([0, 1])
    for _ in range(2):
        pixels = kept.pixels([0, 1])
        assert torch.equal(pixels, true)
        pixels.zero_()


def test_epochs_of_prefetched_batches_decode_once(files):
    expected = [files.pixels(rows) for rows in BATCHES]
    files.decoded.clear()
    chosen = Chosen(DecodedCache(files), range(6))
    for _ in range(3):
        fetched = list(prefetched(chosen, BATCHES))
        assert all(torch.equal(*pair) for pair in zip(fetched, expected, strict=True))
    assert files.decoded == dict.fromkeys(range(6), 1)


def test_many_threads_at_once(files):
    kept, together = DecodedCache(files, 4 * BYTES), Barrier(8)
    expected = files.pixels(range(6))
    files.decoded.clear()

    def read(thread: int) -> bool:
        rows = [(thread + i) % 6 for i in range(6)]
        together.wait()
        return all(torch.equal(kept.pixels(rows), expected[rows]) for _ in range(5))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    assert kept.cached_bytes == 4 * BYTES and sorted(files.decoded.values()) == [1, 1, 1, 1, 40, 40]


def test_an_error_is_not_kept(files):
    good = files.paths[2].read_bytes()
    files.paths[2].write_bytes(b"no image")
    kept = DecodedCache(files)
    for _ in range(2):
        with expect_error("unreadable-image", DataError):
            kept.pixels([1, 2])
    assert kept.cached_bytes == 0
    files.paths[2].write_bytes(good)
    assert torch.equal(kept.pixels([1, 2]), files.pixels([1, 2]))


def test_files_joined_with_images_in_memory_are_decoded_once_too(files):
    array = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    both = cache_decoded(Joined([ArrayImages(array), Chosen(files, [4, 2])]))
    for _ in range(3):
        pixels = both.pixels([3, 0, 2])
    assert files.decoded == {2: 1, 4: 1}
    assert torch.equal(pixels, torch.cat([files.pixels([2]), array[:1], files.pixels([4])]))
