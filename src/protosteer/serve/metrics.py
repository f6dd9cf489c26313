"""Counters and histograms in Prometheus' text format, which is plain enough to be written by hand."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]):
        self.counts = dict.fromkeys((*bounds, math.inf), 0)  # of values up to each bound
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.sum += value
        for bound in self.counts:
            self.counts[bound] += value <= bound

    def lines(self, name: str, **labels: str) -> Iterator[str]:
        for bound, count in self.counts.items():
            yield _line(f"{name}_bucket", count, **labels, le="+Inf" if bound == math.inf else bound)
        yield _line(f"{name}_sum", self.sum, **labels)
        yield _line(f"{name}_count", self.counts[math.inf], **labels)


class Metrics:
    """What the service has done since it started. Routes are templates, so that lines are bounded."""

    def __init__(self, models: Iterable[str]):
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, str, int]] = Counter()
        self._seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self._batches = {model: Histogram(_BATCHES) for model in models}

    def request(self, model: str, method: str, route: str, status: int, seconds: float) -> None:
        """model: its name, or "" for what is about none."""
        with self._lock:
            self._requests[model, method, route, status] += 1
            self._seconds[model, route].add(seconds)

    def batch(self, model: str, images: int) -> None:
        with self._lock:
            self._batches[model].add(images)

    def text(self, gauges: Mapping[str, tuple[str, Mapping[str, int]]]) -> str:
        """gauges: name -> (what it is, its value now for each model)."""
        with self._lock:
            return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: Mapping[str, tuple[str, Mapping[str, int]]]) -> Iterator[str]:
        yield from _header("protosteer_requests_total", "counter", "HTTP requests answered.")
        for (model, method, route, status), count in sorted(self._requests.items()):
            labels = {"method": method, "route": route, "status": status}
            yield _line("protosteer_requests_total", count, **_of(model), **labels)
        yield from _header("protosteer_request_seconds", "histogram", "Time from request to answer.")
        for (model, route), histogram in sorted(self._seconds.items()):
            yield from histogram.lines("protosteer_request_seconds", **_of(model), route=route)
        yield from _header("protosteer_images_total", "counter", "Images predicted.")
        for model, batches in self._batches.items():
            yield _line("protosteer_images_total", int(batches.sum), **_of(model))
        yield from _header("protosteer_batch_images", "histogram", "Images that were predicted together.")
        for model, batches in self._batches.items():
            yield from batches.lines("protosteer_batch_images", **_of(model))
        for name, (meaning, values) in gauges.items():
            yield from _header(name, "gauge", meaning)
            for model, value in values.items():
                yield _line(name, value, **_of(model))


def _of(model: str) -> dict[str, str]:
    return {"model": model} if model else {}


def _header(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _line(name: str, value: float, **labels: object) -> str:
    listed = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
    return f"{name}{{{listed}}} {value}" if listed else f"{name} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
