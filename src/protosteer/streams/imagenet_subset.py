"""Split ImageNet-subset: 100 classes of ImageNet, ten at a time."""

from __future__ import annotations

from protosteer.data.datasets import Dataset
from protosteer.streams.base import Benchmark, LoadContext


def load(context: LoadContext) -> Dataset:
    return context.open("imagenet-subset")


BENCHMARK = Benchmark("imagenet-subset", "Split ImageNet-subset", tasks=10, crop=0.875, load=load)
