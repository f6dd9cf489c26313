"""The processes that torchrun has started: the same program runs on every rank.

Every rank reads the same input, draws the same random numbers and takes the same decisions. Ranks share the
forward and backward passes of the backbone: each computes its own rows, and `gather` gives all rows to all.
Rank 0 writes files and prints. Without torchrun the group has one process, and nothing here has any effect.

Tensors on a CUDA device go through nccl, everything else through gloo.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import protosteer
from protosteer.errors import DistributedError, SettingsError
from protosteer.util.text import one_line

# How long a rank waits for another one. A process that ends is noticed at once.
TIMEOUT = timedelta(minutes=30)
# How long a rank that fails waits for rank 0 to report the same mistake.
_RANK0_SECONDS = 5.0


class ProcessGroup:
    """This process's rank, the number of processes, and the collective operations between them."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None):
        self.rank, self.size = rank, size
        self._store = store

    @property
    def is_rank0(self) -> bool:
        """True if this process writes files and prints."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"process {self.rank} of {self.size} on {socket.gethostname()}"

    def shares(self, count: int) -> list[slice]:
        """Split `count` rows into one slice for each rank; the first ranks may have one row more."""
        ends = [(rank * count + self.size - 1) // self.size for rank in range(self.size + 1)]
        return [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]

    def share(self, count: int) -> slice:
        """Return this rank's slice of `count` rows; the first row if it were empty, which `gather` ignores."""
        rank_rows = self.shares(count)[self.rank]
        return rank_rows if rank_rows.stop > rank_rows.start else slice(0, 1)

    def broadcast_object(self, find: Callable[[], Any]) -> Any:
        """Call `find` on rank 0 and return its result on every rank."""
        if self.size == 1:
            return find()
        results = [find() if self.is_rank0 else None]
        with _connected():
            dist.broadcast_object_list(results, src=0)
        return results[0]

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks."""
        total = _sendable(tensor).clone()
        with _connected():
            dist.all_reduce(total)
        return total.to(tensor.device)

    def gather(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate the first counts[rank] rows of every rank's `part`: [sum(counts), ...] on all ranks."""
        if self.size == 1:
            return part
        num_rows = counts[self.rank]
        padded = _sendable(part).new_zeros(max(counts), *part.shape[1:])  # a collective wants equal shapes
        padded[:num_rows] = part[:num_rows]
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with _connected():
            dist.all_gather(parts, padded)
        return torch.cat([rows[:n] for rows, n in zip(parts, counts, strict=True)]).to(part.device)

    def claim_report(self) -> bool:
        """Return True if this rank reports why the group ends: one message, printed once.

        Rank 0 goes first, because its message is that of a single process.
        """
        if self.size == 1:
            return True
        try:
            end = time.monotonic() + (0.0 if self.is_rank0 else _RANK0_SECONDS)
            while time.monotonic() < end and not self._store.check(["failed"]):
                time.sleep(0.02)
            return bool(self._store.compare_set("failed", "", str(self.rank)) == str(self.rank).encode())
        except RuntimeError:  # torchrun itself has ended, and its store with it
            return self.is_rank0

    def leave(self) -> None:
        """Wait until all ranks are done, and disconnect."""
        with _connected():
            dist.barrier()
            dist.destroy_process_group()


_group = ProcessGroup()


def process_group() -> ProcessGroup:
    """Return the group that this process is in; a group of one without torchrun."""
    return _group


def join() -> ProcessGroup:
    """Join the process group of torchrun, by the environment variables that it sets; return it."""
    global _group
    from torch.distributed.rendezvous import rendezvous

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group, cuda = ProcessGroup(rank, size), torch.cuda.is_available()
    if cuda and _local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(_local_rank())
    try:
        store, *_ = next(rendezvous("env://", rank, size, timeout=TIMEOUT))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        message = (
            f"{group} cannot meet the others at {address} ({one_line(str(error))}); pass the same address and "
            "number of nodes to every torchrun"
        )
        raise DistributedError(message, code="no-rendezvous", address=address) from error
    group._store = store
    _group = group
    _check_versions(group)
    return group


def check_cuda_device() -> None:
    """Raise if this process has no CUDA device of its own."""
    if _group.size > 1 and _local_rank() >= (devices := torch.cuda.device_count()):
        message = f"{_group} has no CUDA device; start at most {devices} processes on this node"
        raise SettingsError(message, code="too-few-devices", devices=devices)


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def _check_versions(group: ProcessGroup) -> None:
    versions = {"protosteer": protosteer.__version__, "torch": torch.__version__}
    for package, version in group.broadcast_object(lambda: versions).items():
        if versions[package] != version:
            message = f"{group} has {package} {versions[package]} and process 0 has {version}; install one version on all nodes"
            raise DistributedError(message, code="other-version", package=package)


class SumGradients(torch.autograd.Function):
    """Return a tensor; its gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        """Return the tensor."""
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of all ranks."""
        return ctx.group.reduce_sum(gradient), None


class GatherRows(torch.autograd.Function):
    """Gather all rows on all ranks. Each rank has the whole gradient already and takes its own rows of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: list[slice], group: ProcessGroup) -> Tensor:
        """Return the rows of all ranks."""
        ctx.share, ctx.count = shares[group.rank], len(rows)
        return group.gather(rows, [share.stop - share.start for share in shares])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's rows."""
        part_gradient = gradient.new_zeros(ctx.count, *gradient.shape[1:])
        rows = gradient[ctx.share]
        part_gradient[: len(rows)] = rows
        return part_gradient, None, None


def _sendable(tensor: Tensor) -> Tensor:
    """Return the tensor where nccl (CUDA) or gloo (CPU) can send it."""
    return (tensor if tensor.is_cuda else tensor.cpu()).detach().contiguous()


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DistributedError(
            "another process of the group has ended, or did not answer for "
            f"{TIMEOUT.total_seconds() / 60:.0f} minutes; see torchrun's report. To resume, run the same command "
            "with any number of processes",
            code="process-lost",
        ) from error
