"""Draw reliability diagrams: accuracy against confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from protosteer.evaluation.metrics import pooled
from protosteer.report.plots import DPI, legend_text, line_style, png
from protosteer.util.statistics import BINS, Bins, calibration_error

FAINT_SHARE = 1.0  # percent of the images, below which a bin is drawn faintly


def reliability_plot(rows: Mapping[str, Sequence[Bins]]) -> bytes:
    """Draw each bin's accuracy at its mean confidence, one line per row; below, the share of images per bin.

    The seeds of a row are pooled.
    """
    figure = Figure(dpi=DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 100], [0, 100], color="#777777", linewidth=1, linestyle=(0, (4, 3)))
    for i, (name, seeds) in enumerate(rows.items()):
        _row(upper, lower, i, name, pooled(seeds))
    upper.set(title="Reliability of probabilities", ylabel="accuracy (%)", xlim=(0, 100), ylim=(0, 102))
    lower.set(xlabel="confidence (%)", ylabel="images (%)", ylim=(0, None))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = upper.get_legend_handles_labels()
    figure.set_size_inches(6.4, 5.6 + 0.2 * sum(1 + label.count("\n") for label in labels))
    figure.legend(
        handles, labels, loc="outside lower center", frameon=False, title="calibration error (faint: bins of less than 1 % of the images)",
        alignment="left",
    )  # fmt: skip
    return png(figure)


def _row(upper: Axes, lower: Axes, i: int, name: str, bins: Bins) -> None:
    """Draw line number i."""
    style = line_style(i)
    marker, colour = style.pop("marker"), style["color"]
    shares = 100.0 * np.array([b["images"] for b in bins]) / sum(b["images"] for b in bins)
    confidence, accuracy = (
        np.array([np.nan if b[part] is None else b[part] for b in bins], dtype=float)
        for part in ("confidence", "accuracy")
    )
    has_images = shares > 0
    upper.plot(confidence[has_images], accuracy[has_images], linewidth=1, alpha=0.5, **style)
    for bins_drawn, alpha, label in (
        (has_images & (shares < FAINT_SHARE), 0.35, None),
        (shares >= FAINT_SHARE, 1.0, legend_text(name, f"{calibration_error(bins):.1f} %")),
    ):
        upper.scatter(
            confidence[bins_drawn], accuracy[bins_drawn], color=colour, marker=marker, alpha=alpha, s=40, label=label,
            linewidths=0, zorder=3, clip_on=False,
        )  # fmt: skip
    lower.stairs(shares, np.linspace(0, 100, BINS + 1), linewidth=2, **style)
