"""Counters and histograms in Prometheus' text format, which is plain enough to be written by hand."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)

Labels = Mapping[str, str]


class Histogram:
    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        total = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield _line(f"{name}_bucket", {**labels, "le": bound}, total)
        yield _line(f"{name}_sum", labels, self.sum)
        yield _line(f"{name}_count", labels, total)


class Metrics:
    """What the service has done since it started. Routes are templates, so that lines are bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str, int], int] = {}
        self._seconds: dict[str, Histogram] = {}
        self._batches = Histogram(_BATCHES)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        key = (method, route, status)
        with self._lock:
            self._requests[key] = self._requests.get(key, 0) + 1
            self._seconds.setdefault(route, Histogram(_SECONDS)).add(seconds)

    def batch(self, images: int) -> None:
        with self._lock:
            self._batches.add(images)

    def text(self, gauges: Mapping[str, tuple[str, int]]) -> str:
        """gauges: name -> (what it is, its value now)."""
        with self._lock:
            return "\n".join([*self._lines(), *_gauges(gauges), ""])

    def _lines(self) -> Iterator[str]:
        yield from _header("protosteer_requests_total", "counter", "HTTP requests answered.")
        for (method, route, status), count in sorted(self._requests.items()):
            labels = {"method": method, "route": route, "status": str(status)}
            yield _line("protosteer_requests_total", labels, count)
        yield from _header("protosteer_request_seconds", "histogram", "Time from request to answer.")
        for route, histogram in sorted(self._seconds.items()):
            yield from histogram.lines("protosteer_request_seconds", {"route": route})
        yield from _header("protosteer_images_total", "counter", "Images predicted.")
        yield _line("protosteer_images_total", {}, int(self._batches.sum))
        yield from _header("protosteer_batch_images", "histogram", "Images that were predicted together.")
        yield from self._batches.lines("protosteer_batch_images", {})


def _gauges(gauges: Mapping[str, tuple[str, int]]) -> Iterator[str]:
    for name, (meaning, value) in gauges.items():
        yield from _header(name, "gauge", meaning)
        yield _line(name, {}, value)


def _header(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    listed = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{listed}}} {value}" if listed else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
