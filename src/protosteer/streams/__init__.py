"""Benchmarks as sequences of tasks."""

from __future__ import annotations

from pathlib import Path

from protosteer.data.datasets.base import Benchmark, Reading
from protosteer.data.datasets.registry import BENCHMARKS, open_benchmark
from protosteer.data.downloads import Say, to_stderr
from protosteer.data.labelled import Dataset
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError
from protosteer.streams import folder
from protosteer.streams.base import Stream, Task, build
from protosteer.streams.options import StreamOptions
from protosteer.util.plugins import entry_point_names, is_file_spec, load_entry_point, load_from_file
from protosteer.util.text import suggestion

__all__ = [
    "BENCHMARKS", "Benchmark", "Stream", "StreamOptions", "Task",
    "find_benchmark", "load_dataset", "open_stream", "split", "split_digits",
]  # fmt: skip

ENTRY_POINTS = "protosteer.streams"


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark of a name, of `folder:PATH`, of an installed package, or of `path/to/file.py:NAME`.

    Raises:
        DataError: There is none (code "unknown-stream"), or it is no `Benchmark` (code "not-a-benchmark").
    """
    if name.startswith((folder.PREFIX, folder.DOMAINS)):
        return folder.benchmark(name)
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    plugin = load_from_file(name) if is_file_spec(name) else load_entry_point(ENTRY_POINTS, name)
    if plugin is None:
        known_names = [*BENCHMARKS, f"{folder.PREFIX}PATH", f"{folder.DOMAINS}PATH", *entry_point_names(ENTRY_POINTS)]
        message = f"no stream is called '{name}'; {suggestion(name, known_names)}"
        raise DataError(message, code="unknown-stream", name=name)
    if not isinstance(plugin, Benchmark):
        raise DataError(f"{name} is not a protosteer.streams.Benchmark", code="not-a-benchmark", name=name)
    return plugin


def open_stream(
    name: str,
    options: StreamOptions,
    preprocessing: Preprocessing,
    data_dir: Path | None = None,
    skip_unreadable: bool = False,
    on_message: Say = to_stderr,
) -> Stream:
    """Load a benchmark's images and split them into tasks.

    Args:
        name: A benchmark's name, or `folder:PATH`.
        options: How to split the classes into tasks.
        preprocessing: The backbone's, with the crop of `find_benchmark(name)` if it has one. Images are cropped to
            its size when they are decoded.
        data_dir: Where datasets are; None: the default folder.
        skip_unreadable: Skip images that cannot be decoded, and report them.
        on_message: Called with lines about downloads, skipped images and blurry task boundaries.

    Returns:
        The stream.
    """
    benchmark = find_benchmark(name)
    dataset = load_dataset(benchmark, preprocessing, data_dir, skip_unreadable, on_message)
    return split(benchmark, dataset, options, on_message)


def load_dataset(
    benchmark: Benchmark,
    preprocessing: Preprocessing,
    data_dir: Path | None = None,
    skip_unreadable: bool = False,
    on_message: Say = to_stderr,
) -> Dataset:
    """Load a benchmark's images; see `open_stream`."""
    reading = Reading(preprocessing, skip_unreadable, on_message)
    return benchmark.load(reading) if benchmark.load else open_benchmark(benchmark, data_dir, reading)


def split(benchmark: Benchmark, dataset: Dataset, options: StreamOptions, on_message: Say = to_stderr) -> Stream:
    """Split a benchmark's images into tasks; see `open_stream`."""
    stream = build(benchmark, dataset, options)
    if options.blurry:
        counts = (f"{sum(task.visitors.values())} of {len(task.train)} in {task.name}" for task in stream)
        on_message(f"training images of other tasks' classes: {', '.join(counts)}")
    return stream


def split_digits(tasks: int = 5) -> Stream:
    """Split the ten digits into tasks in natural order; half of the images are for training."""
    half = (0.5, 0.5, 0.5)  # has no effect: only images from files are cropped
    return open_stream("split-digits", StreamOptions(tasks=tasks), Preprocessing(8, half, half))
