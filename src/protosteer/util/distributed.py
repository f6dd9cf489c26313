"""Several processes that do one piece of work together, as torchrun starts them. One alone needs none of it.

Process 0 leads: it alone reads the command line, holds what changes, decides, writes and prints. The others
help. They wait until they are asked to call a function, and call it while the leader does its own share.
Whatever was decided, drawn or learned is the leader's, so that processes whose last bits differ cannot drift
apart, and a run goes on with any number of them: a helper has nothing that would have to be kept.

What is small or of Python goes through gloo; tensors on a CUDA device go through nccl.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

import protosteer
from protosteer.errors import DistributedError, SettingsError
from protosteer.util.text import one_line

# For whom one waits while all are at work on one batch. Whose process has ended is known at once.
ANSWER = timedelta(minutes=10)
# Helpers have nothing to do while the leader downloads, clusters, or tests a rule on what is embedded.
IDLE = timedelta(days=30)


class Lendable(Protocol):
    """What helpers get once and keep as long as the leader has it: a backbone, images."""

    def portable(self) -> Any:
        """The same for another process, on the CPU."""


@dataclass
class _Call:
    function: Callable[..., None]
    lent: list[int]
    arguments: tuple[Any, ...]
    threads: int
    repeatable: bool  # whether kernels that are not repeatable are to be avoided
    new: dict[int, Any] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)


class World:
    """Who of how many this process is, counted from 0, and what passes between them."""

    def __init__(self, rank: int = 0, size: int = 1, calls: Any = None):
        self.rank, self.size = rank, size
        self._calls = calls  # the group that may wait long
        self._lent: dict[int, int] = {}  # by id of what was lent: its number
        self._gone: list[int] = []
        self._numbers = 0
        self._held: dict[int, Any] = {}  # by number: what was lent to this helper

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def device(self, kind: str) -> torch.device:
        """This process's own device of a kind."""
        if kind != "cuda":
            return torch.device(kind)
        own, there = _local_rank(), torch.cuda.device_count()
        if own >= there:
            raise SettingsError(f"no CUDA device is left for process {own} of this node; start {there} on it")
        return torch.device(kind, own)

    def shares(self, count: int) -> list[slice]:
        """Of so many rows everyone's own, one after the other; the first have one more if need be."""
        ends = [(rank * count + self.size - 1) // self.size for rank in range(self.size + 1)]
        return [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]

    def ask(self, function: Callable[..., None], lent: Sequence[Lendable], *arguments: Any) -> None:
        """Helpers call function(world, *lent, *arguments), which takes part in what the leader does next."""
        new: dict[int, Any] = {}
        numbers = [self._lend(thing, new) for thing in lent]
        gone, self._gone = self._gone, []
        repeatable = torch.are_deterministic_algorithms_enabled()
        call = _Call(function, numbers, arguments, torch.get_num_threads(), repeatable, new, gone)
        self.told(lambda: call)

    def _lend(self, thing: Lendable, new: dict[int, Any]) -> int:
        if id(thing) not in self._lent:
            new[self._numbers] = thing.portable()
            self._lent[id(thing)] = self._numbers
            self._numbers += 1
            weakref.finalize(thing, self._take_back, id(thing))
        return self._lent[id(thing)]

    def _take_back(self, identity: int) -> None:
        self._gone.append(self._lent.pop(identity))

    def help(self) -> None:
        """Do what the leader asks for until it has no more to ask."""
        while (call := self.told(lambda: None)) is not None:
            torch.set_num_threads(call.threads)
            if call.repeatable:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True, warn_only=True)
            for number in call.gone:
                del self._held[number]
            self._held |= call.new
            call.function(self, *(self._held[number] for number in call.lent), *call.arguments)

    def told(self, find: Callable[[], Any]) -> Any:
        """What the leader finds, for all; helpers do not look themselves."""
        if self.size == 1:
            return find()
        import torch.distributed as dist

        said = [find() if self.leads else None]
        with _connected():
            dist.broadcast_object_list(said, src=0, group=self._calls)
        return said[0]

    def spread(self, tensor: Tensor) -> Tensor:
        """The leader's numbers, for all; helpers give a tensor of the same shape."""
        import torch.distributed as dist

        sent = _sendable(tensor)
        with _connected():
            dist.broadcast(sent, src=0)
        return sent.to(tensor.device)

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over all, for the leader alone; what helpers get is of no use."""
        import torch.distributed as dist

        sent = _sendable(tensor).clone()
        with _connected():
            dist.reduce(sent, dst=0)
        return sent.to(tensor.device)

    def gathered(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Everyone's rows [counts[rank], ...], in order, for the leader; a helper gets its own back.

        counts: may be of fewer than there are, and 0; who has no rows need not take part.
        """
        if self.size == 1:
            return part
        if not self.leads:
            self._exchange([("isend", _sendable(part), 0)])
            return part
        own = _sendable(part)
        whole = own.new_empty(sum(counts), *own.shape[1:])
        first, *others = whole.split(list(counts))  # views, into which is written what the others send
        first.copy_(own)
        self._exchange([("irecv", rows, rank) for rank, rows in enumerate(others, 1)])
        return whole.to(part.device)

    def scattered(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The way back: the leader's rows, each to whom it came from. A helper gives room for its own."""
        sent = _sendable(rows)
        if not self.leads:
            self._exchange([("irecv", sent, 0)])
            return sent.to(rows.device)
        first, *others = sent.split(list(counts))
        self._exchange([("isend", part, rank) for rank, part in enumerate(others, 1)])
        return first.to(rows.device)

    def _exchange(self, messages: Sequence[tuple[str, Tensor, int]]) -> None:
        import torch.distributed as dist

        wanted = [dist.P2POp(getattr(dist, kind), rows, rank) for kind, rows, rank in messages if len(rows)]
        with _connected():
            for message in dist.batch_isend_irecv(wanted) if wanted else ():
                message.wait()

    def leave(self) -> None:
        """The leader has no more to ask; all go at once."""
        import torch.distributed as dist

        if self.leads:
            self.told(lambda: None)
        with _connected():
            dist.barrier(group=self._calls)
            dist.destroy_process_group()


_here = World()


def here() -> World:
    """The world that this process is in."""
    return _here


def join() -> World:
    """Meet the processes that torchrun has started, by the variables that it has set."""
    global _here
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    if _local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(_local_rank())
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=ANSWER)
        _here = World(rank, size, dist.new_group(backend="gloo", timeout=IDLE))
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DistributedError(
            f"{name(rank, size)} cannot meet the others at {place} ({one_line(str(error))}); see that "
            "torchrun has the same address and the same number of nodes everywhere"
        ) from error
    _check_versions(_here)
    return _here


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def name(rank: int, size: int) -> str:
    return f"process {rank} of {size} on {socket.gethostname()}"


def _check_versions(world: World) -> None:
    """What is sent is of one version; what is computed should be."""
    own = {"protosteer": protosteer.__version__, "torch": torch.__version__}
    for package, version in world.told(lambda: own).items():
        if own[package] != version:
            raise DistributedError(
                f"{name(world.rank, world.size)} has {package} {own[package]} and process 0 has {version}; "
                "install one version everywhere"
            )


def _sendable(tensor: Tensor) -> Tensor:
    """nccl sends what is on a CUDA device, gloo what is on the CPU."""
    return (tensor if tensor.is_cuda else tensor.cpu()).detach().contiguous()


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DistributedError(
            "a process of the group has ended, or did not answer for "
            f"{ANSWER.total_seconds() / 60:.0f} minutes: its own line, or torchrun's report, says why; what "
            "was kept goes on with the same command, with as many processes as you like"
        ) from error
