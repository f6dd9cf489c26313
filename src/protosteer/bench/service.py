"""The HTTP service under load, against `Learner.predict` on the same image files.

The service is a process of its own: `python -m protosteer.bench.service BACKBONE` prints its address and serves. The
load comes from this process, by one thread that keeps the connections of all clients open. A client sends one request
and waits for the answer before it sends the next. The load generator uses the same cores, and what it takes is part
of the service's time.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
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

# Backbone; kind, size and number of its image files.
CASES: dict[str, tuple[Callable[[], Backbone], str, tuple[int, int], int]] = {
    "nano": (lambda: Backbone.load("nano"), ".png", (32, 32), 1024),
    "tiny": (vit_tiny, ".jpg", (500, 375), 128),
    "small": (small, ".png", (16, 16), 32),  # for tests
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


def throughput(name: str, which: str, repeats: int, sizes: Sequence[int] = (1,)) -> list[Ratio]:
    """Images a second at saturation against those of `predict`, with so many images a request: one ratio each."""
    learner = learner_for(CASES[which][0]())
    with tempfile.TemporaryDirectory() as folder, serving(which) as server:
        files = image_files(which, Path(folder))
        sides: dict[int, Side] = {0: partial(learner.predict, files)}  # 0 images a request: no service
        for size in sizes:
            sides[size] = partial(drive, server, requests_of(files, size), CLIENTS[-1])
        times = interleaved(sides, repeats)
        requests = requests_of(files, 1)
        waits = [_waits(server, requests[: len(files) // 4], clients) for clients in CLIENTS[:-1]]
        waits.append(_waits(server, requests, CLIENTS[-1]))
    rate = {side: f"{len(files) / median(seconds):.1f} images a second" for side, seconds in times.items()}
    about = f"{learner.backbone.name}: service, {CLIENTS[-1]} clients, against predict; images a request:"
    ratios = []
    for size in sizes:
        notes = [f"{rate[size]}; predict {rate[0]}"]
        own = name if size == 1 else f"{name}_{size}"
        ratios.append(Ratio.of(own, f"{about} {size}", times[0], times[size], TARGET, notes))
    ratios[0].notes.append("; ".join(waits))
    return ratios


def _waits(server: Server, requests: Sequence[bytes], clients: int) -> str:
    seconds = quantiles(drive(server, requests, clients), n=100, method="inclusive")
    return f"clients: {clients}, p50 {1000 * seconds[49]:.1f} ms, p99 {1000 * seconds[98]:.1f} ms"


def flat_memory(which: str, early: int = EARLY, later: int = LATER) -> list[Ratio]:
    """What the service's process holds after some requests, against after many more. Measured on Linux alone."""
    if not Path("/proc/self/statm").exists():
        return []
    with tempfile.TemporaryDirectory() as folder, serving(which) as server:
        requests = requests_of(image_files(which, Path(folder)), 1)
        resident = []
        for count in (early, *[later // LOOKS] * LOOKS):
            drive(server, list(islice(cycle(requests), count)), CLIENTS[-1])
            resident.append(server.resident())
    about = f"{which}: memory of the service after {early:,} requests, against after {early + later:,}"
    # What an allocator takes at times and keeps are steps; a leak would be a slope.
    held = ", ".join(f"{some / 1e6:.1f}" for some in resident)
    notes = [f"{held} MB, looked at every {later // LOOKS:,} requests from the first figure on"]
    return [Ratio.of("service_memory", about, resident[:1], resident[-1:], MEMORY_TARGET, notes)]


@dataclass(frozen=True)
class Server:
    process: int
    host: str
    port: int

    def resident(self) -> int:
        """Bytes of memory that the process holds."""
        pages = Path(f"/proc/{self.process}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def drive(server: Server, requests: Sequence[bytes], clients: int) -> list[float]:
    """Seconds until each request was answered. An error among the answers ends it."""
    try:
        return asyncio.run(asyncio.wait_for(_drive(server, requests, clients), _PATIENCE))
    except asyncio.TimeoutError:
        message = f"the service did not answer {len(requests)} requests in {_PATIENCE:g} s"
        raise ProtosteerError(message) from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ProtosteerError(f"the service cannot be reached, or hung up: {error}") from error


async def _drive(server: Server, requests: Sequence[bytes], clients: int) -> list[float]:
    waiting = iter(requests)  # shared out to the clients one by one
    seconds = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        for request in waiting:
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            seconds.append(time.perf_counter() - began)
            if not head.startswith(b"HTTP/1.1 200 "):
                answer = head.partition(b"\r\n")[0] + b", " + body[:200]
                raise ProtosteerError(f"a request to the service failed: {answer.decode('utf-8', 'replace')}")
        writer.close()

    await asyncio.gather(*(client() for _ in range(min(clients, len(requests)))))
    return seconds


def requests_of(files: Sequence[Path], size: int) -> list[bytes]:
    """POST /predict of `size` files each, byte for byte."""
    return [_request(files[i : i + size]) for i in range(0, len(files), size)]


def _request(files: Sequence[Path]) -> bytes:
    body = b""
    for file in files:
        about = f'Content-Disposition: form-data; name="images"; filename="{file.name}"'
        body += f"--{_BOUNDARY}\r\n{about}\r\n\r\n".encode() + file.read_bytes() + b"\r\n"
    body += f"--{_BOUNDARY}--\r\n".encode()
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\n\r\n"
    )
    return head.encode() + body


def image_files(which: str, folder: Path) -> list[Path]:
    """Fields of colours with some grain, which keeps them from being compressed to nothing."""
    backbone, suffix, size, count = CASES[which]
    pixels = pictures(backbone(), count)
    grain = torch.randint(0, 32, pixels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    paths = [folder / f"{i}{suffix}" for i in range(count)]
    for path, picture in zip(paths, (pixels // 2 + grain).permute(0, 2, 3, 1).numpy(), strict=True):
        Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC).save(path)
    return paths


@contextmanager
def serving(which: str) -> Iterator[Server]:
    """A service in a process of its own, with as many threads as this one has, until the end of the block."""
    command = [sys.executable, "-m", "protosteer.bench.service", which]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = urlsplit((process.stdout.readline() if process.stdout else "").strip())
            if not address.hostname or not address.port:
                raise ProtosteerError(f"the service did not start; run {' '.join(command[1:])} to see why")
            yield Server(process.pid, address.hostname, address.port)
        finally:
            process.terminate()


def serve(which: str) -> None:
    """In the child: the service as `protosteer serve` runs it, of a model that nobody had to learn."""
    from protosteer.serve.app import create_app
    from protosteer.serve.app import run as serve_until_stopped

    app = create_app(
        learner_for(CASES[which][0]()), "bench.protosteer"
    )  # nothing is taught: there is no file
    serve_until_stopped(app, port=0, on_ready=lambda address: print(address, flush=True))


if __name__ == "__main__":
    serve(sys.argv[1])
