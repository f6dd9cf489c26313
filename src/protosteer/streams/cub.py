"""Split CUB-200: 200 kinds of birds, twenty at a time."""

from __future__ import annotations

from protosteer.data.datasets import Dataset
from protosteer.streams.base import Benchmark, LoadContext


def load(context: LoadContext) -> Dataset:
    return context.open("cub200")


BENCHMARK = Benchmark("cub200", "Split CUB-200", tasks=10, crop=0.875, load=load)
