"""Measure the HTTP service under load, against `Learner.predict` on the same image files.

    python benchmarks/bench_service.py --repeats 3

The service runs in a process of its own: `python benchmarks/bench_service.py --serve CASE` prints its address and
serves. Clients are threads of this process; each keeps its connection, and waits for an answer before it sends
the next request. Clients and service share the cores, and the clients' time is part of the service's time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median, quantiles
from urllib.parse import urlsplit

import torch
from PIL import Image

from measure_script import measure_script
from protosteer.backbones import Backbone
from protosteer.bench.harness import Ratio, Side, interleaved, learner_for, pictures, vit_tiny
from protosteer.errors import ProtosteerError
from protosteer.serve.app import create_app
from protosteer.serve.app import run as serve_until_stopped

TARGET = 0.9
CLIENTS = (1, 8, 64)  # the last number saturates the service
PATIENCE = 900.0  # seconds in which a request must be answered
_BOUNDARY = "protosteer-bench"
_HEADERS = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}

# Backbone; kind, size and number of its image files.
CASES: dict[str, tuple[Callable[[], Backbone], str, tuple[int, int], int]] = {
    "tiny": (vit_tiny, ".jpg", (500, 375), 128),
    "nano": (partial(Backbone.load, "nano"), ".png", (32, 32), 1024),
}


def run(repeats: int) -> list[Ratio]:
    tiny = throughput("service_throughput", "tiny", repeats)
    return tiny + throughput("service_throughput_nano", "nano", repeats, (1, 16))


def throughput(name: str, case: str, repeats: int, sizes: Sequence[int] = (1,)) -> list[Ratio]:
    """Measure images per second at saturation against those of `predict`: one ratio per size of a request."""
    learner = learner_for(CASES[case][0]())
    with tempfile.TemporaryDirectory() as folder, serving(case) as address:
        files = image_files(case, Path(folder))
        sides: dict[int, Side] = {0: partial(learner.predict, files)}  # 0 images a request: no service
        sides |= {size: partial(drive, address, forms(files, size), CLIENTS[-1]) for size in sizes}
        times = interleaved(sides, repeats)
        waits = [_waits(drive(address, forms(files, 1), clients), clients) for clients in CLIENTS]
    rate = {side: f"{len(files) / median(seconds):.1f} images a second" for side, seconds in times.items()}
    about = f"{learner.backbone.name}: service, {CLIENTS[-1]} clients, against predict; images a request:"
    ratios = []
    for size in sizes:
        ratio_name = name if size == 1 else f"{name}_{size}"
        notes = [f"{rate[size]}; predict {rate[0]}"]
        ratios.append(Ratio(ratio_name, f"{about} {size}", times[0], times[size], TARGET, notes))
    ratios[0].notes.extend(waits)
    return ratios


def _waits(seconds: Sequence[float], clients: int) -> str:
    percent = quantiles(seconds, n=100, method="inclusive")
    return f"clients: {clients}, p50 {1000 * percent[49]:.1f} ms, p99 {1000 * percent[98]:.1f} ms"


def drive(address: str, forms: Sequence[bytes], clients: int) -> list[float]:
    """Post each form to /predict; return the seconds until each was answered. The first error is raised."""
    thread_state = threading.local()

    def connect() -> None:
        thread_state.connection = HTTPConnection(address, timeout=PATIENCE)

    def post(form: bytes) -> float:
        began = time.perf_counter()
        thread_state.connection.request("POST", "/predict", form, _HEADERS)
        answer = thread_state.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            detail = body[:200].decode("utf-8", "replace")
            raise ProtosteerError(
                f"a request to the service failed: {answer.status} {answer.reason}, {detail}",
                code="request-failed",
            )
        return time.perf_counter() - began

    try:
        with ThreadPoolExecutor(clients, initializer=connect) as pool:
            return list(pool.map(post, forms))
    except (OSError, HTTPException) as error:
        raise ProtosteerError(
            f"the service cannot be reached, or hung up: {error}", code="service-unreachable"
        ) from error


def forms(files: Sequence[Path], size: int) -> list[bytes]:
    """Return bodies of requests with `size` files each."""
    about = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{{}}"\r\n\r\n'
    parts = [about.format(file.name).encode() + file.read_bytes() + b"\r\n" for file in files]
    end = f"--{_BOUNDARY}--\r\n".encode()
    return [b"".join(parts[i : i + size]) + end for i in range(0, len(parts), size)]


def image_files(case: str, folder: Path) -> list[Path]:
    """Write fields of colours with some grain, so that they are not compressed to almost nothing."""
    backbone, suffix, size, count = CASES[case]
    pixels = pictures(backbone(), count)
    grain = torch.randint(0, 32, pixels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    paths = [folder / f"{i}{suffix}" for i in range(count)]
    for path, picture in zip(paths, (pixels // 2 + grain).permute(0, 2, 3, 1).numpy(), strict=True):
        Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC).save(path)
    return paths


@contextmanager
def serving(case: str) -> Iterator[str]:
    """Run a service in another process, with as many threads as this one; yield its address."""
    command = [sys.executable, __file__, "--serve", case]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = urlsplit((process.stdout.readline() if process.stdout else "").strip()).netloc
            if not address:
                raise ProtosteerError(
                    f"the service did not start; run {' '.join(command[1:])} to see why", code="no-service"
                )
            yield address
        finally:
            process.terminate()


def serve(case: str) -> None:
    """Run the service as `protosteer serve` does, of a random model whose file is never written."""
    app = create_app(learner_for(CASES[case][0]()), "bench.protosteer")
    serve_until_stopped(app, port=0, on_ready=lambda address: print(address, flush=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        measure_script(run)
