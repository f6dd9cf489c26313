"""Experiments whose numbers are not metrics of runs; a definition names one as `study`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protosteer.reproduction.results import Result

# By name: a function of definition, scale, cells, failed runs and `place=`.
STUDIES: dict[str, Callable[..., Result]] = {}


def register_study(name: str) -> Callable[[Any], Any]:
    """Register the function that fills the cells of experiments with `study = NAME`."""

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        STUDIES[name] = function
        return function

    return register
