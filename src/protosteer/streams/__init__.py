"""Benchmarks, each an indexable sequence of tasks."""

from protosteer.streams.base import Stream, Task
from protosteer.streams.digits import split_digits

__all__ = ["Stream", "Task", "split_digits"]
