"""Plot accuracy against its cost: memory, training time and forward passes, one numbered point per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protosteer.report.plots import DPI, Floats, png, short_name
from protosteer.report.tables import spread_over_seeds

WIDTH, HEIGHT = 19.0, 7.4  # inches
ON_FRONT, OFF_FRONT = "#0072B2", "#6E6E6E"
MARK = 13.0  # diameter of a point in typographic points: its number fits inside


@dataclass(frozen=True)
class Cost:
    """One panel: the metric on its horizontal axis."""

    metric: str
    title: str
    axis: str
    floor: float | None = None  # where a logarithmic axis shows zero; None: linear axis


COSTS = (
    Cost("bytes_per_class", "Memory", "bytes per class", floor=1.0),
    Cost("train_seconds", "Training", "seconds of learning, all tasks", floor=1e-3),
    Cost("passes_per_image", "Prediction", "forward passes per image"),
)


@dataclass(frozen=True)
class Point:
    """One row in one panel; its number is its rank by accuracy, the same in every panel."""

    number: int
    cost: float
    accuracy: float
    cost_std: float
    accuracy_std: float


def pareto_plot(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Draw the plot as PNG bytes; a row without a panel's metric is missing from that panel."""
    return png(pareto_figure(rows))


def pareto_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw one panel per cost, and a legend that maps numbers to rows, the most accurate first."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI)
    panels = figure.subplots(1, len(COSTS), sharey=True)
    figure.subplots_adjust(left=0.04, right=0.84, bottom=0.085, top=0.88, wspace=0.05)
    figure.suptitle("Accuracy after the last task, and what it costs", fontsize=14, x=0.04, ha="left")
    caption = "blue: no other row is as accurate for less"
    if any(len(seeds) > 1 for seeds in rows.values()):
        caption += "; bars: one standard deviation over runs"
    figure.text(0.84, 0.955, caption, ha="right", color=OFF_FRONT)
    names = rank(rows)
    for axes, cost in zip(panels, COSTS, strict=True):
        _panel(axes, cost, points_of(rows, cost))
    panels[0].set_ylabel("Last accuracy (%), mean over tasks")
    legend = "\n".join(f"{number:>3}  {short_name(name)}" for number, name in enumerate(names, 1))
    size = 9.0 if len(names) <= 30 else 270 / len(names)
    figure.text(0.85, 0.88, legend, va="top", fontsize=size, family="monospace", parse_math=False)
    return figure


def rank(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Sort the labels of rows that have an accuracy, the most accurate first."""
    means = {name: spread_over_seeds(seeds)[0].get("last_accuracy") for name, seeds in rows.items()}
    accuracies = {name: mean for name, mean in means.items() if mean is not None}
    return sorted(accuracies, key=lambda name: -accuracies[name])


def points_of(rows: Mapping[str, Sequence[Mapping[str, Any]]], cost: Cost) -> list[Point]:
    """Make a point of each row that has both metrics, the most accurate first."""
    points = []
    for number, name in enumerate(rank(rows), 1):
        mean, std = spread_over_seeds(rows[name])
        if cost.metric in mean:
            value = mean[cost.metric] if cost.floor is None else max(mean[cost.metric], cost.floor)
            spreads = std.get(cost.metric, 0.0), std.get("last_accuracy", 0.0)
            points.append(Point(number, value, mean["last_accuracy"], *spreads))
    return points


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the (cost, accuracy) pairs that no other pair dominates, in order of cost."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    indices: list[int] = []
    for i in order:
        leader = points[indices[-1]] if indices else None
        if leader is None or points[i][1] > leader[1] or points[i] == leader:  # equals stand side by side
            indices.append(i)
    return indices


def _panel(axes: Axes, cost: Cost, points: Sequence[Point]) -> None:
    axes.set_title(cost.title, fontsize=12)
    axes.set_xlabel(cost.axis)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if not points:
        axes.text(0.5, 0.5, "no run has this metric", transform=axes.transAxes, ha="center", color=OFF_FRONT)
        return
    if cost.floor is not None:
        axes.set_xscale("log", nonpositive="clip")
    else:
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    low, high = _limits(points, logarithmic=cost.floor is not None)
    axes.set_xlim(low, high)
    front_indices = front([(p.cost, p.accuracy) for p in points])
    for i, p in enumerate(points):
        colour, order = (ON_FRONT, 4) if i in front_indices else (OFF_FRONT, 3)
        axes.errorbar(
            p.cost, p.accuracy, p.accuracy_std or None, p.cost_std or None, fmt="o", markersize=MARK,
            markeredgecolor="white", markeredgewidth=0.8, elinewidth=1, color=colour, zorder=order,
        )  # fmt: skip
        at: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": "white", "zorder": order + 0.5}
        axes.text(p.cost, p.accuracy, str(p.number), fontsize=7, **at)
    axes.margins(y=0.06)
    steps = _steps(points, high)
    axes.plot(steps[:, 0], steps[:, 1], color=ON_FRONT, linewidth=1.3, alpha=0.6)


def _limits(points: Sequence[Point], logarithmic: bool) -> tuple[float, float]:
    """Compute limits of the horizontal axis: all points and bars, with room on both sides."""
    bars = np.array([(p.cost - p.cost_std, p.cost, p.cost + p.cost_std) for p in points])
    if not logarithmic:
        room = max(0.09 * np.ptp(bars), 0.5)
        return float(bars.min() - room), float(bars.max() + room)
    # A bar that ends near zero would take most of a logarithmic axis; it is cut off instead.
    decades = np.log10(bars.clip(bars[:, 1].min() / 3))
    room = max(0.09 * np.ptp(decades), 0.3)
    return float(10 ** (decades.min() - room)), float(10 ** (decades.max() + room))


def _steps(points: Sequence[Point], end: float) -> Floats:
    """Compute the corners [k, 2] of the step line along the front, up to the end of the axis."""
    front_points = [points[i] for i in front([(p.cost, p.accuracy) for p in points])]
    costs = [*(p.cost for p in front_points), end]
    return np.array([(cost, p.accuracy) for i, p in enumerate(front_points) for cost in costs[i : i + 2]])
