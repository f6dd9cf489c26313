"""Measure all subjects in one run; report as JSON, or as text for terminals and pipes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text

from protosteer.backbones.precision import AUTO_PRECISION
from protosteer.bench.harness import Ratio
from protosteer.errors import SettingsError
from protosteer.evaluation.manifest import circumstances
from protosteer.report.tables import labels, numbers, plain_table

SUBJECTS = ("prediction", "training", "bf16", "scaling")  # modules, imported when measured


def run_all(
    names: Sequence[str] | None,
    repeats: int,
    on_message: Callable[[str], None] = lambda _: None,
    precision: str = AUTO_PRECISION,
) -> tuple[list[Ratio], dict[str, str]]:
    """Measure subjects in the order of SUBJECTS; return the ratios, and the reason for each skipped subject."""
    unknown_names = [name for name in names or () if name not in SUBJECTS]
    if unknown_names:
        message = f"nothing to measure is called {unknown_names[0]!r}; choose from {', '.join(SUBJECTS)}"
        raise SettingsError(message, code="unknown-subject", name=unknown_names[0])
    if repeats < 1:
        raise SettingsError(f"repeats = {repeats}: must be at least 1", code="too-few-repeats")
    ratios, reasons = list[Ratio](), dict[str, str]()
    for name in SUBJECTS:
        if names and name not in names:
            continue
        subject = importlib.import_module(f"protosteer.bench.{name}")
        reason = subject.skip_reason(precision) if hasattr(subject, "skip_reason") else None
        on_message(f"skipping {name}: {reason}" if reason else f"measuring {name} ...")
        if reason:
            reasons[name] = reason
        else:
            ratios += subject.run(repeats)
    return ratios, reasons


def as_json(ratios: Sequence[Ratio], reasons: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return ratios, skipped subjects, notes, and the machine and versions they were measured with."""
    return {
        "ratios": {r.name: {"value": r.value, "target": r.target, "spread": r.spread} for r in ratios},
        "skipped": dict(reasons or {}),
        "notes": {r.name: r.notes for r in ratios},
        **circumstances(torch.device("cpu")),
    }


def table(ratios: Sequence[Ratio]) -> list[RenderableType]:
    """Return a table of ratios, and below it the comparison behind each, with absolute figures."""
    columns = numbers(["reference / ours", "target", "spread", "met"], no_wrap=True)
    overview = plain_table("Reference time / our time: larger is better", labels("what"), *columns)
    for r in ratios:
        cells = (f"{number:.2f}" for number in (r.value, r.target, r.spread))
        overview.add_row(r.name, *cells, "yes" if r.value >= r.target else "no")
    details = [
        Text.assemble((r.name, "bold"), f": {r.about}", *((f"\n  - {note}", "dim") for note in r.notes)) for r in ratios
    ]
    about = circumstances(torch.device("cpu"))
    machine = "{processor}, cores: {cores}, {system}".format(**about["machine"])
    software = "threads: {}, torch {torch}, Python {python}".format(about["threads"], **about["versions"])
    return [overview, *details, Text(f"Absolute figures hold for this machine: {machine}, {software}")]
