"""All measurements in one run: by name, as JSON, as text for terminals and pipes."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from protosteer.bench.timing import Ratio
from protosteer.errors import SettingsError
from protosteer.report.tables import plain_table
from protosteer.util.system import processor_name

# Modules, imported when measured: one needs kornia, one the service's extra, all need torch.
SUBJECTS = ("prediction", "training", "matrix", "scaling", "memory", "startup", "service")


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
        found: list[Ratio] = importlib.import_module(f"protosteer.bench.{name}").run(repeats)
        if not found:
            on_message(f"{name}: nothing to measure on this machine")
        ratios += found
    return ratios


def as_json(ratios: Sequence[Ratio]) -> dict[str, Any]:
    return {
        "ratios": {r.name: {"value": r.value, "target": r.target, "spread": r.spread} for r in ratios},
        "notes": {r.name: list(r.notes) for r in ratios},
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """What the absolute times depend on."""
    import torch

    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def table(ratios: Sequence[Ratio]) -> list[RenderableType]:
    """The ratios; below them what each one compares, with absolute figures as information."""
    if not ratios:
        return []
    overview = plain_table("Reference time / our time: larger is better")
    overview.add_column("what", style="bold", no_wrap=True)
    for heading in ("reference / ours", "target", "spread", "met"):
        overview.add_column(heading, justify="right", no_wrap=True)
    for ratio in ratios:
        numbers = (f"{number:.2f}" for number in (ratio.value, ratio.target, ratio.spread))
        overview.add_row(Text(ratio.name), *numbers, "yes" if ratio.met else "no")
    about = machine()
    where = (
        f"Absolute figures hold for this machine: {about['cpu']}, cores: {about['cores']}, threads: {about['threads']}, "
        f"torch {about['torch']}, Python {about['python']}, {about['platform']}"
    )
    details = [
        Text.assemble((r.name, "bold"), f": {r.about}", *((f"\n  - {note}", "dim") for note in r.notes))
        for r in ratios
    ]
    return [overview, *details, Text(where)]
