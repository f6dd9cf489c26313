"""All measurements in one run: by name, as JSON, as text for terminals and pipes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text

from protosteer.bench.harness import Ratio
from protosteer.errors import SettingsError
from protosteer.evaluation.manifest import circumstances
from protosteer.report.tables import plain_table

SUBJECTS = (
    "prediction",
    "training",
    "decoding",
    "matrix",
    "scaling",
    "service",
)  # modules, imported when measured


def run_all(
    names: Sequence[str] | None, repeats: int, on_message: Callable[[str], None] = lambda _: None
) -> list[Ratio]:
    """Measure the subjects of these names, None: all; always in the order of SUBJECTS."""
    unknown = [name for name in names or () if name not in SUBJECTS]
    if unknown:
        raise SettingsError(f"nothing to measure is called {unknown[0]!r}; choose from {', '.join(SUBJECTS)}")
    if repeats < 1:
        raise SettingsError(f"repeats = {repeats}: must be at least 1")
    ratios: list[Ratio] = []
    for name in SUBJECTS:
        if names and name not in names:
            continue
        on_message(f"measuring {name} ...")
        try:
            ratios += importlib.import_module(f"protosteer.bench.{name}").run(repeats)
        except ImportError as error:  # the service is an extra
            on_message(f"{name} is left out: {error}")
    return ratios


def as_json(ratios: Sequence[Ratio]) -> dict[str, Any]:
    return {
        "ratios": {r.name: {"value": r.value, "target": r.target, "spread": r.spread} for r in ratios},
        "notes": {r.name: r.notes for r in ratios},
        **circumstances(torch.device("cpu")),
    }


def table(ratios: Sequence[Ratio]) -> list[RenderableType]:
    """The ratios; below them what each one compares, with absolute figures as information."""
    overview = plain_table("Reference time / our time: larger is better")
    overview.add_column("what", style="bold", no_wrap=True)
    for heading in ("reference / ours", "target", "spread", "met"):
        overview.add_column(heading, justify="right", no_wrap=True)
    for r in ratios:
        numbers = (f"{number:.2f}" for number in (r.value, r.target, r.spread))
        overview.add_row(Text(r.name), *numbers, "yes" if r.value >= r.target else "no")
    details = [
        Text.assemble((r.name, "bold"), f": {r.about}", *((f"\n  - {note}", "dim") for note in r.notes))
        for r in ratios
    ]
    about = circumstances(torch.device("cpu"))
    where = "{processor}, cores: {cores}, {system}".format(**about["machine"])
    software = "threads: {}, torch {torch}, Python {python}".format(about["threads"], **about["versions"])
    return [overview, *details, Text(f"Absolute figures hold for this machine: {where}, {software}")]
