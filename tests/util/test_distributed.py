"""Shares of work, and how it is when a process is alone."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from conftest import tiny_backbone
from expect import expect_error
from protosteer.data.decode_cache import DecodedCache
from protosteer.data.images import ArrayImages, Chosen, FileImages
from protosteer.errors import DistributedError, SettingsError
from protosteer.util import distributed
from protosteer.util.distributed import World, here


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 17])
def test_shares_are_even_and_the_leader_has_one_first(size: int, count: int) -> None:
    shares = World(size=size).shares(count)
    rows = [list(range(count))[share] for share in shares]
    assert sum(rows, []) == list(range(count)) and len(rows) == size
    assert max(map(len, rows)) - min(map(len, rows)) <= 1 and len(rows[0]) == max(map(len, rows))


def test_alone_everything_is_here() -> None:
    alone = here()
    assert (alone.rank, alone.size, alone.leads) == (0, 1, True)
    assert alone.told(lambda: 3) == 3 and alone.gathered(torch.ones(2), [2]).tolist() == [1, 1]


def test_another_version_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "told", lambda self, find: {**find(), "torch": "0.4"})
    with expect_error("process-group-failed", DistributedError):
        distributed._check_versions(World(1, 2))


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with expect_error("bad-setting", SettingsError):
        World(2, 3).device("cuda")
    assert World(1, 3).device("cpu") == torch.device("cpu")


def test_no_more_is_sent_than_is_needed(tmp_path: Path) -> None:
    array = ArrayImages(torch.randint(256, (500, 3, 16, 16), dtype=torch.uint8))
    some = Chosen(Chosen(array, range(100)), [7, 3])
    sent = pickle.dumps(some.portable())
    assert len(sent) < 5_000 and torch.equal(pickle.loads(sent).pixels([1, 0]), array.pixels([3, 7]))
    files = FileImages(["a.png", tmp_path / "b.png"], tiny_backbone().preprocessing)
    kept = DecodedCache(files)
    kept._canvases[0], kept.cached_bytes = torch.zeros(3, 500, 500), 750_000
    sent = pickle.dumps(kept.portable())
    assert len(sent) < 5_000 and pickle.loads(sent).cached_bytes == 0
    assert pickle.loads(sent).images.paths[0].is_absolute()
