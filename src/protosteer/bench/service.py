"""The HTTP service under load, against `Learner.predict` on the same image files.

The service is a process of its own: `python -m protosteer.bench.service BACKBONE` prints its address and serves. The load
comes from this process, by one thread that keeps the connections of all clients open. A client sends one request and
waits for the answer before it sends the next. The load generator uses the same cores: what it takes is part of the
service's time, and is told.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import cast
from urllib.parse import urlsplit

import torch
from PIL import Image

from protosteer.backbones import Backbone
from protosteer.bench.prediction import learner_for
from protosteer.bench.subjects import pictures, small, vit_tiny
from protosteer.bench.timing import Ratio, Side, interleaved
from protosteer.errors import ProtosteerError, ProtosteerWarning

TARGET, MEMORY_TARGET = 0.9, 0.95
CLIENTS = (1, 8, 64)  # the last is what saturates the service
SEVERAL = 16  # images a request, where it is not one
EARLY, LATER = 500, 5000  # requests before the first look at memory, and from there to the last
LOOKS = 5  # after the first
_PATIENCE = 900.0  # seconds in which a round of requests must be answered
_BOUNDARY = "protosteer-bench"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """A backbone, and the kind of image files that it is sent."""

    backbone: Callable[[], Backbone]
    suffix: str
    size: tuple[int, int]
    images: int  # for throughput
    timed: int  # requests for the latency at fewer clients


CASES = {
    "nano": Case(lambda: Backbone.load("nano"), ".png", (32, 32), 1024, 256),
    "tiny": Case(vit_tiny, ".jpg", (500, 375), 128, 48),
    "small": Case(small, ".png", (16, 16), 32, 8),  # for tests
}


def run(repeats: int) -> list[Ratio]:
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        warnings.warn("the service is not installed: pip install 'protosteer[serve]'", ProtosteerWarning, 2)
        return []
    return [
        *throughput("service_throughput", "tiny", repeats),
        *throughput("service_throughput_nano", "nano", repeats, (1, SEVERAL)),
        *flat_memory("nano"),
    ]


# What is measured


def throughput(name: str, which: str, repeats: int, sizes: Sequence[int] = (1,)) -> list[Ratio]:
    """Images a second at saturation against those of `predict`, with so many images a request: one ratio each."""
    case = CASES[which]
    learner = learner_for(case.backbone())
    with tempfile.TemporaryDirectory() as folder, serving(which) as server:
        files = image_files(learner.backbone, case, Path(folder))
        labels = learner.predict(files).labels
        predict = Meter(lambda: learner.predict(files))
        loads = [Load(server, requests_of(files, size)) for size in sizes]
        meters = [Meter(load.saturate, server) for load in loads]
        sides = {"predict": predict.run, **{str(i): meter.run for i, meter in enumerate(meters)}}
        times = interleaved(sides, repeats)
        latency = latencies(loads[0], case.timed)
    rate = {side: case.images / median(seconds) for side, seconds in times.items()}
    return [
        Ratio.of(
            name if size == 1 else f"{name}_{size}",
            f"{learner.backbone.name}: service, {CLIENTS[-1]} clients, {size} image{'s' * (size > 1)} a request, "
            "against predict on the files",
            times["predict"],
            times[str(i)],
            TARGET,
            [
                f"{rate[str(i)]:.1f} images a second; predict {rate['predict']:.1f}",
                f"processor ms an image: {meters[i].told(case.images)}; predict {predict.told(case.images)}",
                loads[i].told(labels),
                *([latency] if i == 0 else []),
            ],
        )
        for i, size in enumerate(sizes)
    ]


def latencies(load: Load, count: int) -> str:
    """At every number of clients. At the greatest they are known from throughput; at fewer, of `count` requests."""
    told = []
    for clients in CLIENTS:
        answers = (
            load.answers if clients == CLIENTS[-1] else drive(load.server, load.requests[:count], clients)
        )
        p50, p99 = (1000 * quantile([answer.seconds for answer in answers], share) for share in (0.5, 0.99))
        told.append(f"{clients} client{'s' * (clients > 1)}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    return "; ".join(told)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that is not exceeded by this share of them or more."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def flat_memory(which: str, early: int = EARLY, later: int = LATER) -> list[Ratio]:
    """What the service's process holds after some requests, against after many more. Measured on Linux alone."""
    if not Path("/proc/self/statm").exists():
        return []
    backbone = CASES[which].backbone()
    with tempfile.TemporaryDirectory() as folder, serving(which) as server:
        requests = requests_of(image_files(backbone, CASES[which], Path(folder)), 1)
        resident = []
        for count in (early, *[later // LOOKS] * LOOKS):
            drive(server, list(islice(cycle(requests), count)), CLIENTS[-1])
            resident.append(server.resident())
    # What an allocator takes at times and keeps are steps; a leak would be a slope.
    held = ", ".join(f"{some / 1e6:.1f}" for some in resident)
    return [
        Ratio.of(
            "service_memory",
            f"{backbone.name}: memory of the service after {early:,} requests, against after {early + later:,}",
            [resident[0]],
            [resident[-1]],
            MEMORY_TARGET,
            [f"{held} MB, looked at every {later // LOOKS:,} requests from the first figure on"],
        )
    ]


class Meter:
    """Runs a side, and notes how much processor time that took here and in the server."""

    def __init__(self, side: Side, server: Server | None = None):
        self.side = side
        self.server = server
        self.here: list[float] = []
        self.there: list[float] = []

    def run(self) -> None:
        here, there = time.process_time(), self._server_seconds()
        self.side()
        self.here.append(time.process_time() - here)
        self.there.append(self._server_seconds() - there)

    def _server_seconds(self) -> float:
        return self.server.processor_seconds() if self.server else 0.0

    def told(self, images: int) -> str:
        here, there = (f"{1000 * median(seconds) / images:.2f}" for seconds in (self.here, self.there))
        return f"service {there}, load generator {here}" if self.server else here


class Load:
    """The same requests, again and again; all answers are kept."""

    def __init__(self, server: Server, requests: Sequence[bytes]):
        self.server = server
        self.requests = requests
        self.answers: list[Answer] = []

    def saturate(self) -> None:
        self.answers += drive(self.server, self.requests, CLIENTS[-1])

    def told(self, labels: Sequence[str]) -> str:
        """How many requests there were, and whether the answers are those of `predict`, which are given."""
        found = [row["label"] for answer in self.answers for row in json.loads(answer.body)["predictions"]]
        expected = islice(cycle(labels), len(self.answers) * len(labels) // len(self.requests))
        other = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
        return f"{len(self.answers):,} requests, no error; labels other than predict's: {other} of {len(found):,}"


# The load


@dataclass(frozen=True)
class Answer:
    seconds: float  # since the request was written
    body: bytes


def drive(server: Server, requests: Sequence[bytes], clients: int) -> list[Answer]:
    """Answers in the order of the requests. An error among them ends it."""
    try:
        return asyncio.run(asyncio.wait_for(_drive(server, requests, clients), _PATIENCE))
    except asyncio.TimeoutError:
        raise ProtosteerError(
            f"the service did not answer {len(requests)} requests in {_PATIENCE:g} s"
        ) from None
    except OSError as error:
        raise ProtosteerError(f"the service cannot be reached: {error}") from error


async def _drive(server: Server, requests: Sequence[bytes], clients: int) -> list[Answer]:
    loop = asyncio.get_running_loop()
    round_ = Round(requests, loop.create_future())
    transports: list[asyncio.BaseTransport] = []
    try:
        for _ in range(min(clients, len(requests))):
            made = await loop.create_connection(lambda: Client(round_), server.host, server.port)
            transports.append(made[0])
        await round_.finished
    finally:
        for transport in transports:
            transport.close()
    return [round_.answers[i] for i in range(len(requests))]


class Round:
    """Requests that are shared out to the clients one by one."""

    def __init__(self, requests: Sequence[bytes], finished: asyncio.Future[None]):
        self.waiting = iter(enumerate(requests))
        self.count = len(requests)
        self.answers: dict[int, Answer] = {}
        self.finished = finished

    def answered(self, number: int, answer: Answer) -> None:
        self.answers[number] = answer
        if len(self.answers) == self.count and not self.finished.done():
            self.finished.set_result(None)

    def failed(self, number: int, reason: str) -> None:
        if not self.finished.done():
            self.finished.set_exception(ProtosteerError(f"request {number} to the service failed: {reason}"))


class Client(asyncio.Protocol):
    """One connection. As bare as can be, since it takes its time from the service."""

    def __init__(self, round_: Round):
        self.round = round_
        self.received = b""
        self.number: int | None = None  # of the request that is under way
        self.began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self.number, request = next(self.round.waiting, (None, b""))
        if self.number is not None:
            self.received = b""
            self.began = time.perf_counter()
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if self.number is None or not end or not length or len(body) < int(length[1]):
            return
        if head.startswith(b"HTTP/1.1 200 "):
            self.round.answered(self.number, Answer(time.perf_counter() - self.began, body))
            self._send()
        else:
            status = head.partition(b"\r\n")[0].decode("latin-1")
            self.round.failed(self.number, f"{status}, {body.decode('utf-8', 'replace')[:200]}")

    def connection_lost(self, error: Exception | None) -> None:
        """Also at the end of a round, and where the server has had enough of a client that is idle."""
        if self.number is not None:
            self.round.failed(self.number, f"the connection was closed ({error or 'no reason given'})")


def requests_of(files: Sequence[Path], size: int) -> list[bytes]:
    """POST /predict of `size` files each, byte for byte."""
    return [_request(files[i : i + size]) for i in range(0, len(files), size)]


def _request(files: Iterable[Path]) -> bytes:
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{file.name}"\r\n'
        f"Content-Type: application/octet-stream\r\n\r\n".encode()
        + file.read_bytes()
        + b"\r\n"
        for file in files
    ]
    body = b"".join([*parts, f"--{_BOUNDARY}--\r\n".encode()])
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\n\r\n"
    )
    return head.encode() + body


def image_files(backbone: Backbone, case: Case, folder: Path) -> list[Path]:
    """Fields of colours with some grain, which keeps them from being compressed to nothing."""
    pixels = pictures(backbone, case.images)
    grain = torch.randint(0, 32, pixels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    paths = []
    for i, picture in enumerate((pixels // 2 + grain).permute(0, 2, 3, 1).numpy()):
        paths.append(folder / f"{i}{case.suffix}")
        Image.fromarray(picture).resize(case.size, Image.Resampling.BICUBIC).save(paths[-1])
    return paths


# The service


@dataclass(frozen=True)
class Server:
    process: int
    host: str
    port: int

    def resident(self) -> int:
        """Bytes of memory that the process holds."""
        pages = Path(f"/proc/{self.process}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def processor_seconds(self) -> float:
        """Of all its threads since it began; not a number but on Linux."""
        try:
            after_name = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("nan")
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(which: str) -> Iterator[Server]:
    """A service in a process of its own, with as many threads as this one has, until the end of the block."""
    command = [sys.executable, "-m", "protosteer.bench.service", which]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            address = urlsplit(process.stdout.readline().strip())
            if not address.hostname or not address.port:
                process.wait()
                log.seek(0)
                reason = (log.read().strip().splitlines() or ["no message"])[-1]
                raise ProtosteerError(f"the service did not start: {reason}; run {' '.join(command[1:])}")
            yield Server(process.pid, address.hostname, address.port)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def serve(which: str) -> None:
    """In the child: the service as `protosteer serve` runs it, of a model that nobody had to learn."""
    from protosteer.serve.app import create_app
    from protosteer.serve.app import run as serve_until_stopped

    learner = learner_for(CASES[which].backbone())
    app = create_app(learner, "bench.protosteer")  # nothing is taught, so that there is no file
    serve_until_stopped(app, port=0, on_ready=lambda address: print(address, flush=True))


if __name__ == "__main__":
    serve(sys.argv[1])
