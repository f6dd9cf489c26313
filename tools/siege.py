"""A siege of the service, on this machine alone: ordinary clients among hostile ones, for some seconds.

    python tools/siege.py --seconds 120
    python tools/siege.py --requests 100000

The service is a process of its own with the backbone `nano` and a random model. Ordinary clients send images
whose answers are known; odd ones send what is refused in one line; hostile ones send headers without end,
half requests, names of others, and bodies that are no form. It is held if every ordinary request is answered
as it was before the siege, every odd one with its status, and the service's memory stays below a bound.

With `--requests`, one client asks one request after the other, right and odd ones, and the service's memory must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from bench_service import forms, image_files, serving

MOST_MEGABYTES = 1500
MOST_GROWTH = 20  # megabytes that the second half of many requests may add
_FORM = {"Content-Type": "multipart/form-data; boundary=protosteer-bench"}


class Siege:
    def __init__(self, address: str, bodies: Sequence[bytes], seconds: float):
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.bodies = bodies
        self.expected = [self._predict(body) for body in bodies]
        self.until = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.waits: list[float] = []
        self._lock = threading.Lock()

    def ordinary(self) -> None:
        """One request, which must be answered as before the siege; a full queue may ask for patience."""
        number = self.counts["ordinary"] % len(self.bodies)
        began = time.monotonic()
        labels = self._predict(self.bodies[number])
        with self._lock:
            self.waits.append(time.monotonic() - began)
        self._note("ordinary", labels == self.expected[number], f"labels {labels}")

    def odd(self) -> None:
        """Requests that are rejected with one line."""
        for method, path, headers, body, status in (
            ("POST", "/predict", _FORM, b"--x", 422),
            ("POST", "/predict", {"Content-Type": "application/json"}, b'{"images": NaN}', 422),
            ("POST", "/classes/new", _FORM, b"", 403),
            ("GET", "/model", {"Host": "evil.example"}, b"", 421),
            ("GET", "/classes/%ff", {}, b"", 400),
            ("GET", "/" + "a" * 9000, {}, b"", 414),
            ("BREW", "/predict", {}, b"", 400),
        ):
            answer_status, answer_body = self._request(method, path, headers, body)
            is_right = answer_status == status and list(json.loads(answer_body)) == ["detail"]
            self._note("odd", is_right, f"{method} {path[:20]}: {answer_status}")

    def giant_header(self) -> None:
        self._pour(b"GET /healthz HTTP/1.1\r\nX: ", b"a" * 65536, 8 * 2**20)

    def giant_trailer(self) -> None:
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        self._pour(head + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 65536, 8 * 2**20)

    def half_request(self) -> None:
        """Eight connections that send half a request, or nothing, and stay for a while."""
        opened = [self._connect() for _ in range(8)]
        for client in opened[1:]:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        time.sleep(2)
        for client in opened:
            client.close()
        self._note("half requests", True, "")

    def gone(self) -> None:
        """A client that does not wait for its answer."""
        with self._connect() as client:
            body = self.bodies[0]
            head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: {_FORM['Content-Type']}\r\n\r\n".encode() + body)
        self._note("gone", True, "")
        time.sleep(1)

    def repeat(self, work: Callable[[], None]) -> None:
        while time.monotonic() < self.until:
            try:
                work()
            except (OSError, ValueError) as error:
                # Connections of hostile requests may be closed; a valid request must get an answer.
                self._note(work.__name__, work not in (self.ordinary, self.odd), repr(error))

    def _predict(self, body: bytes) -> list[str]:
        for _ in count():
            status, answer = self._request("POST", "/predict", _FORM, body)
            if status != 503:
                return [row["label"] for row in json.loads(answer)["predictions"]]
            time.sleep(0.2)
        raise AssertionError

    def _request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        connection = HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=60)

    def _pour(self, start: bytes, piece: bytes, size: int) -> None:
        with self._connect() as client:
            client.sendall(start)
            for _ in range(size // len(piece)):
                client.sendall(piece)
            self._note("poured", client.recv(12).startswith(b"HTTP/1.1 4"), "a stream without end was taken")

    def _note(self, kind: str, is_right: bool, detail: str) -> None:
        with self._lock:
            self.counts[kind] += 1
            if not is_right:
                self.wrong.append(f"{kind}: {detail}")


def steady(siege: Siege, process: str, requests: int) -> None:
    """So many requests one after the other: a tenth with images, the others of every kind, and memory after each tenth."""
    paths = (
        "/classes",
        "/model",
        "/healthz",
        "/map",
        "/metrics",
        "/models",
        "/classes/none",
        "/jobs/none",
        "/openapi.json",
    )
    connection = HTTPConnection(siege.host, siege.port, timeout=60)
    at = dict[int, float]()
    for number in range(requests):
        if number % 10 == 0:
            connection.request("POST", "/predict", siege.bodies[number % len(siege.bodies)], _FORM)
        else:
            connection.request("GET", paths[number % len(paths)])
        answer = connection.getresponse()
        answer.read()
        siege.counts[str(answer.status)] += 1
        if answer.status >= 500 and answer.status != 503:
            siege.wrong.append(f"{number}: {answer.status}")
        if (number + 1) % max(1, requests // 10) == 0:
            at[number + 1] = megabytes(process, "VmRSS")
            print(f"{number + 1:,} requests: {at[number + 1]:.0f} MB", flush=True)
    half, end = (at[max(n for n in at if n <= share)] for share in (requests // 2, requests))
    print(", ".join(f"{status}: {number:,}" for status, number in sorted(siege.counts.items())))
    if siege.wrong or end > half + MOST_GROWTH:
        raise SystemExit(
            f"{len(siege.wrong)} wrong answers {siege.wrong[:3]}; {half:.0f} MB at half time, {end:.0f} at the end"
        )


def megabytes(process: str, key: str = "VmHWM") -> float:
    """Return a process's peak memory (VmHWM) or current memory (VmRSS), in megabytes."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    match = re.search(rf"{key}:\s+(\d+) kB", status)
    return int(match[1]) / 1000 if match else float("nan")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--requests", type=int, default=0, help="ask so many, one after the other, instead")
    parser.add_argument("--clients", type=int, default=4, help="of each kind")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, serving("nano") as address:
        (process,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
        bodies = forms(image_files("nano", Path(folder))[:64], 4)
        siege = Siege(address, bodies, options.seconds)
        if options.requests:
            steady(siege, process, options.requests)
            return
        megabytes_before = megabytes(process)
        kinds = (
            siege.ordinary,
            siege.odd,
            siege.giant_header,
            siege.giant_trailer,
            siege.half_request,
            siege.gone,
        )
        works = [kind for kind in kinds for _ in range(options.clients)]
        threads = [threading.Thread(target=siege.repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        megabytes_after = megabytes(process)
    print(", ".join(f"{kind}: {number:,}" for kind, number in sorted(siege.counts.items())))
    print(f"ordinary: median {median(siege.waits):.2f} s, longest {max(siege.waits):.2f} s")
    print(f"memory at most: {megabytes_before:.0f} MB before, {megabytes_after:.0f} MB after")
    print(f"wrong: {len(siege.wrong)}", *siege.wrong[:5], sep="\n  ")
    if siege.wrong or megabytes_after > MOST_MEGABYTES:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
