"""Split ImageNet-R: 200 classes of ImageNet as art, cartoons, toys and the like, twenty at a time."""

from __future__ import annotations

from protosteer.data.datasets import Dataset
from protosteer.streams.base import Benchmark, LoadContext


def load(context: LoadContext) -> Dataset:
    return context.open("imagenet-r")


BENCHMARK = Benchmark("imagenet-r", "Split ImageNet-R", tasks=10, crop=0.875, load=load)
