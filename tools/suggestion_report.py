"""Figures of `tools/suggestions.py` as Markdown and as a plot."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from statistics import fmean

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from protosteer.report.plots import DPI, LINE_COLOURS
from protosteer.util.files import write_atomically


def _mean(curves: list[list[float]]) -> list[float]:
    return [fmean(column) for column in zip(*curves, strict=True)]


def _gaps(ours: list[list[float]], theirs: list[list[float]]) -> list[tuple[float, float]]:
    """Return mean and standard error, over seeds, of the difference after each round."""
    differences = torch.tensor(ours, dtype=torch.double) - torch.tensor(theirs, dtype=torch.double)
    errors = differences.std(dim=0) / len(differences) ** 0.5
    return list(zip(differences.mean(dim=0).tolist(), errors.tolist(), strict=True))


def labels_needed(curve: Sequence[float], level: float, count: int) -> float | None:
    """Return the labels until a mean curve reaches a level, interpolated between rounds; None: it does not."""
    for turn in range(1, len(curve)):
        start, end = curve[turn - 1], curve[turn]
        if end >= level:
            return count * (turn - 1 + max(0.0, (level - start) / (end - start))) if end > start else count * turn
    return None


def table(options: argparse.Namespace) -> None:
    for path in options.results:
        f = json.loads(path.read_text())
        means, count = {name: _mean(curves) for name, curves in f["curves"].items()}, f["count"]
        print(f"\n{path.stem}: {f['classes']} classes, {f['start']} images each at first, {f['seeds']} seeds\n")
        print("| labels added | " + " | ".join(str(count * turn) for turn in range(f["rounds"] + 1)) + " |")
        print("|---|" + "---|" * (f["rounds"] + 1))
        for name, mean in means.items():
            print(f"| {name} | " + " | ".join(f"{a:.1f}" for a in mean) + " |")
        gaps = _gaps(f["curves"]["suggested"], f["curves"]["random"])
        print("| suggested less random | " + " | ".join(f"{m:+.1f} ± {e:.1f}" for m, e in gaps) + " |")
        cells = [labels_needed(means["suggested"], level, count) for level in means["random"][1:]]
        print("| suggestions for what random reaches | 0 | ", end="")
        print(" | ".join("–" if cell is None else f"{cell:.0f}" for cell in cells) + " |")
        wrong = _mean([list(w.values()) for w in f["wrong_labels"]])
        print("\nwrong labels: " + ", ".join(f"{k} {v:.1f}" for k, v in zip(f["wrong_labels"][0], wrong, strict=True)))
        shares = ", ".join(f"{name} {share:.1f} %" for name, share in f["copies"]["found"].items())
        print(f"copies: {f['copies']['taken_for_copies']} of {f['copies']['pictures']} pictures; {shares}")


def plot(options: argparse.Namespace) -> None:
    figure = Figure(figsize=(4.2 * len(options.results), 3.6), layout="constrained")
    axes = figure.subplots(1, len(options.results), squeeze=False)[0]
    for axis, path in zip(axes, options.results, strict=True):
        f = json.loads(path.read_text())
        for name, colour in zip(("suggested", "random"), (LINE_COLOURS[4], LINE_COLOURS[0]), strict=True):
            curves = torch.tensor(f["curves"][name])
            x = [f["count"] * turn for turn in range(curves.shape[1])]
            axis.plot(x, curves.mean(dim=0), color=colour, marker="o", markersize=3, label=name)
            axis.fill_between(x, curves.amin(dim=0), curves.amax(dim=0), color=colour, alpha=0.15, lw=0)
        axis.set_title(f"{f['data']}, {f['classes']} classes, {f['backbone']}", fontsize=9)
        axis.set_xlabel("labels added")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test images right (%)")
    axes[0].legend(frameon=False)
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(file, dpi=DPI, format="png")
    write_atomically(options.out, file.getvalue())
