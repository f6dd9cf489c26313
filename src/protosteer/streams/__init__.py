"""Benchmarks, each an indexable sequence of tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError
from protosteer.streams import cifar100, cub, digits, five, folder, imagenet_r, imagenet_subset
from protosteer.streams.base import Benchmark, LoadContext, Stream, Task, build
from protosteer.streams.digits import split_digits
from protosteer.streams.options import StreamOptions
from protosteer.util.text import suggestion

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "LoadContext",
    "Stream",
    "StreamOptions",
    "Task",
    "build",
    "find_benchmark",
    "open_stream",
    "split_digits",
]

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (cifar100, five, imagenet_subset, imagenet_r, cub, digits)
}


def find_benchmark(name: str) -> Benchmark:
    if name.startswith(folder.PREFIX):
        return folder.benchmark(name)
    if name not in BENCHMARKS:
        known = [*BENCHMARKS, f"{folder.PREFIX}PATH"]
        raise DataError(f"no stream is called '{name}'; {suggestion(name, known)}")
    return BENCHMARKS[name]


def open_stream(
    name: str,
    options: StreamOptions,
    preprocessing: Preprocessing,
    data_dir: Path | None = None,
    skip_unreadable: bool = False,
    on_message: Callable[[str], None] | None = None,
) -> Stream:
    """Load a benchmark's images and share them out over tasks.

    preprocessing: the backbone's, with the crop of `find_benchmark(name)` where that has one; images that
    are decoded from files are cut to its canvas.
    """
    benchmark = find_benchmark(name)
    context = LoadContext(preprocessing, data_dir, skip_unreadable, on_message)
    return build(benchmark, benchmark.load(context), options)
