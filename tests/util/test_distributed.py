"""Shares of work, a group of one, and the checks before work begins."""

import pytest
import torch

from expect import expect_error
from protosteer.errors import DistributedError, SettingsError
from protosteer.util import distributed
from protosteer.util.distributed import ProcessGroup, process_group


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 17])
def test_shares_are_even_and_rank_0_has_one_first(size: int, count: int) -> None:
    shares = ProcessGroup(size=size).shares(count)
    rows = [list(range(count))[share] for share in shares]
    assert sum(rows, []) == list(range(count)) and len(rows) == size
    assert max(map(len, rows)) - min(map(len, rows)) <= 1 and len(rows[0]) == max(map(len, rows))
    for rank in range(size):
        own = ProcessGroup(rank, size).share(count)
        assert own == (shares[rank] if rows[rank] else slice(0, 1))


def test_one_process_is_a_group_of_its_own() -> None:
    group = process_group()
    assert (group.rank, group.size, group.is_rank0) == (0, 1, True) and group.claim_report()
    assert group.broadcast_object(lambda: 3) == 3 and group.gather(torch.ones(2), [2]).tolist() == [1, 1]


def test_versions_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroup, "broadcast_object", lambda self, find: {**find(), "torch": "0.4"})
    with expect_error("other-version", DistributedError, package="torch"):
        distributed._check_versions(ProcessGroup(1, 2))


def test_every_process_needs_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    distributed.check_cuda_device()
    monkeypatch.setattr(distributed, "_group", ProcessGroup(2, 3))
    with expect_error("too-few-devices", SettingsError, devices=2):
        distributed.check_cuda_device()


def test_processes_that_cannot_meet_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with expect_error("no-rendezvous", DistributedError, address="None:1"):
        distributed.join()
