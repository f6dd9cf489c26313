"""Split Digits: scikit-learn's 8 x 8 handwritten digits, which need no download, two at a time."""

from __future__ import annotations

from protosteer.data.datasets import Dataset
from protosteer.data.transforms import Preprocessing
from protosteer.streams.base import Benchmark, LoadContext, Stream, build
from protosteer.streams.options import StreamOptions


def load(context: LoadContext) -> Dataset:
    return context.open("digits")


BENCHMARK = Benchmark("split-digits", "Split Digits", tasks=5, crop=1.0, load=load)


def split_digits(tasks: int = 5) -> Stream:
    """Ten digits in natural order, shared out over the tasks; half of the images train, half test."""
    half = (0.5, 0.5, 0.5)  # of no consequence: only images that come from files are cut to a canvas
    dataset = load(LoadContext(Preprocessing(8, half, half)))
    return build(BENCHMARK, dataset, StreamOptions(tasks=tasks))
