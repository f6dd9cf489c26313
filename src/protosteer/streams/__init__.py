"""Benchmarks, each an indexable sequence of tasks."""

from __future__ import annotations

from pathlib import Path

from protosteer.data.datasets.base import Benchmark, Reading
from protosteer.data.datasets.registry import BENCHMARKS, open_benchmark
from protosteer.data.downloads import Say, to_stderr
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError
from protosteer.streams import folder
from protosteer.streams.base import Stream, Task, build
from protosteer.streams.options import StreamOptions
from protosteer.util.text import suggestion

__all__ = [
    "BENCHMARKS", "Benchmark", "Stream", "StreamOptions", "Task",
    "find_benchmark", "open_stream", "split_digits",
]  # fmt: skip


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
    on_message: Say = to_stderr,
) -> Stream:
    """Load a benchmark's images and share them out over tasks.

    preprocessing: the backbone's, with the crop of `find_benchmark(name)` where that has one; images that
    are decoded from files are cut to its canvas. skip_unreadable: leave images out that cannot be decoded,
    and name them. on_message: takes lines about them, about downloads and about images that visit other tasks.
    """
    benchmark, reading = find_benchmark(name), Reading(preprocessing, skip_unreadable, on_message)
    own = name.startswith(folder.PREFIX)
    dataset = folder.load(name, reading) if own else open_benchmark(benchmark, data_dir, reading)
    stream = build(benchmark, dataset, options)
    if options.blurry:
        counts = (f"{sum(task.visitors.values())} of {len(task.train)} in {task.name}" for task in stream)
        on_message(f"training images of other tasks' classes: {', '.join(counts)}")
    return stream


def split_digits(tasks: int = 5) -> Stream:
    """Ten digits in natural order, shared out over the tasks; half of the images train, half test."""
    half = (0.5, 0.5, 0.5)  # of no consequence: only images that come from files are cut to a canvas
    return open_stream("split-digits", StreamOptions(tasks=tasks), Preprocessing(8, half, half))
