"""Counters, histograms and gauges of the service, in a Prometheus registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Count requests, images and batches since the service started.

    Routes are templates and models are served ones, so that the number of series is bounded.
    """

    def __init__(self, models: Iterable[str]):
        self.registry = CollectorRegistry()
        self._requests = self._make(
            Counter, "requests", "HTTP requests answered.", "model", "method", "route", "status"
        )
        self._seconds = self._make(
            Histogram, "request_seconds", "Time from request to answer.", "model", "route", buckets=_SECONDS
        )
        self._images = self._make(Counter, "images", "Images predicted.", "model")
        self._batches = self._make(
            Histogram, "batch_images", "Images that were predicted together.", "model", buckets=_BATCHES
        )
        for model in models:
            self._images.labels(model)
            self._batches.labels(model)

    def _make(self, kind: Callable[..., Any], name: str, meaning: str, *labels: str, **options: Any) -> Any:
        return kind(f"protosteer_{name}", meaning, labels, registry=self.registry, **options)

    def request(self, model: str, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `model` is "" for a request that is about none."""
        self._requests.labels(model, method, route, status).inc()
        self._seconds.labels(model, route).observe(seconds)

    def batch(self, model: str, images: int) -> None:
        """Count a batch of images that were predicted together."""
        self._images.labels(model).inc(images)
        self._batches.labels(model).observe(images)

    def gauge(self, name: str, meaning: str, values: dict[str, Callable[[], float]]) -> None:
        """Register a gauge with one function per model, which is called when the metrics are read."""
        gauge = self._make(Gauge, name, meaning, "model")
        for model, value in values.items():
            gauge.labels(model).set_function(value)

    def text(self) -> bytes:
        """Format all metrics for a Prometheus server."""
        return generate_latest(self.registry)
