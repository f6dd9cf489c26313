"""Split CIFAR-100: the 100 classes of CIFAR-100, ten at a time."""

from __future__ import annotations

from protosteer.data.datasets import Dataset
from protosteer.streams.base import Benchmark, LoadContext


def load(context: LoadContext) -> Dataset:
    return context.open("cifar100")


BENCHMARK = Benchmark("split-cifar100", "Split CIFAR-100", tasks=10, crop=1.0, load=load)
