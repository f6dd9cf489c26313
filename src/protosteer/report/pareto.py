"""What accuracy costs, as a plot: accuracy against memory, training time and forward passes, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from protosteer.report.plots import DPI, Floats, png, short_name
from protosteer.report.tables import spread_over_seeds

WIDTH, HEIGHT = 19.0, 7.4  # inches
ON_FRONT, BEHIND, LEADER = "#0072B2", "#6E6E6E", "#B4B4B4"
MARK = 5.0  # pixels from the middle of a point to its rim, with a little room
GAP = 2.0  # pixels between two labels
NEIGHBOURHOOD = 60.0  # pixels
DIRECTIONS = 24
REACHES = (
    8,
    14,
    22,
    32,
    44,
    58,
    76,
    96,
    120,
    150,
    185,
    225,
    270,
    320,
    380,
    450,
    530,
)  # pixels, tried in turn


@dataclass(frozen=True)
class Cost:
    """A panel: the figure that it has on its horizontal axis."""

    figure: str
    title: str
    axis: str
    least: float | None = None  # on a logarithmic axis, what stands for nothing at all; None: linear


COSTS = (
    Cost("bytes_per_class", "Memory", "bytes per class", least=1.0),
    Cost("train_seconds", "Training", "seconds of learning, all tasks", least=1e-3),
    Cost("passes_per_image", "Prediction", "forward passes per image"),
)


@dataclass(frozen=True)
class Point:
    name: str
    cost: float
    accuracy: float
    cost_std: float
    accuracy_std: float


def pareto_plot(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """rows: a label and the figures of each of its seeds. A row that lacks a figure is not in its panel."""
    return png(pareto_figure(rows))


def pareto_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI)
    panels = figure.subplots(1, len(COSTS), sharey=True)
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.085, top=0.88, wspace=0.05)
    figure.suptitle("Accuracy after the last task, and what it costs", fontsize=14, x=0.04, ha="left")
    several = any(len(seeds) > 1 for seeds in rows.values())
    about = "blue: no other row is as accurate for less" + (
        "; bars: one standard deviation over seeds" if several else ""
    )
    figure.text(0.99, 0.955, about, ha="right", color=BEHIND)
    for axes, cost in zip(panels, COSTS, strict=True):
        _panel(axes, cost, points_of(rows, cost))
    panels[0].set_ylabel("Last accuracy (%), mean over tasks")
    FigureCanvasAgg(figure)
    for axes, cost in zip(panels, COSTS, strict=True):  # when all limits are known
        _label(axes, points_of(rows, cost))
    return figure


def points_of(rows: Mapping[str, Sequence[Mapping[str, Any]]], cost: Cost) -> list[Point]:
    """The rows that have both figures."""
    points = []
    for name, seeds in rows.items():
        mean, std = spread_over_seeds(seeds)
        if cost.figure in mean and "last_accuracy" in mean:
            spent = mean[cost.figure] if cost.least is None else max(mean[cost.figure], cost.least)
            spreads = std.get(cost.figure, 0.0), std.get("last_accuracy", 0.0)
            points.append(Point(name, spent, mean["last_accuracy"], *spreads))
    return points


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of the (cost, accuracy) that no other beats: at least as accurate for at most the cost, and
    better in one of both. In order of cost."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    chosen: list[int] = []
    for i in order:
        best = points[chosen[-1]] if chosen else None
        if best is None or points[i][1] > best[1] or points[i] == best:  # equals stand side by side
            chosen.append(i)
    return chosen


def _panel(axes: Axes, cost: Cost, points: Sequence[Point]) -> None:
    axes.set_title(cost.title, fontsize=12)
    axes.set_xlabel(cost.axis)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if not points:
        axes.text(0.5, 0.5, "no run has this figure", transform=axes.transAxes, ha="center", color=BEHIND)
        return
    if cost.least is not None:
        axes.set_xscale("log", nonpositive="clip")
    else:
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    low, high = _limits(points, logarithmic=cost.least is not None)
    axes.set_xlim(low, high)
    best = front([(p.cost, p.accuracy) for p in points])
    for i, p in enumerate(points):
        axes.errorbar(
            p.cost, p.accuracy, p.accuracy_std or None, p.cost_std or None, fmt="o", markersize=6, markeredgewidth=0,
            elinewidth=1, color=ON_FRONT if i in best else BEHIND, zorder=4 if i in best else 3,
        )  # fmt: skip
    axes.margins(y=0.06)
    steps = _steps(points, high)
    axes.plot(steps[:, 0], steps[:, 1], color=ON_FRONT, linewidth=1.3, alpha=0.6)


def _limits(points: Sequence[Point], logarithmic: bool) -> tuple[float, float]:
    """Of the horizontal axis: all points and bars, with room on both sides even if all cost the same."""
    bars = np.array([(p.cost - p.cost_std, p.cost, p.cost + p.cost_std) for p in points])
    if not logarithmic:
        room = max(0.09 * np.ptp(bars), 0.5)
        return float(bars.min() - room), float(bars.max() + room)
    # A bar that ends near nothing would have the axis to itself: it leaves the picture.
    decades = np.log10(bars.clip(bars[:, 1].min() / 3))
    room = max(0.09 * np.ptp(decades), 0.3)
    return float(10 ** (decades.min() - room)), float(10 ** (decades.max() + room))


def _steps(points: Sequence[Point], end: float) -> Floats:
    """Corners [k, 2] of the line along the front: what can be had for a cost, up to the end of the axis."""
    best = [points[i] for i in front([(p.cost, p.accuracy) for p in points])]
    costs = [*(p.cost for p in best), end]
    return np.array([(cost, p.accuracy) for i, p in enumerate(best) for cost in costs[i : i + 2]])


def _label(axes: Axes, points: Sequence[Point]) -> None:
    """Each point's name beside it; a thin line leads to one that had to stand further off."""
    if not points:
        return
    best = front([(p.cost, p.accuracy) for p in points])
    look: dict[str, Any] = {"fontsize": 8.5 if len(points) <= 15 else 7.5 if len(points) <= 30 else 6.5}
    look |= {"ha": "center", "va": "center", "transform": None, "parse_math": False, "zorder": 5}
    look |= {"path_effects": [withStroke(linewidth=2, foreground="white")]}
    texts = [axes.text(0, 0, short_name(p.name), **look) for p in points]
    for i in best:
        texts[i].set(color=ON_FRONT, weight="bold")
    boxes = [text.get_window_extent(_renderer(axes)) for text in texts]
    sizes = np.array([[box.width, box.height] for box in boxes])
    places = _pixels(axes, [(p.cost, p.accuracy) for p in points])
    frame = axes.bbox
    middles = spread_labels(places, sizes, (frame.x0, frame.y0, frame.x1, frame.y1), _lines(axes, points))
    for text, place, middle, size in zip(texts, places, middles, sizes, strict=True):
        text.set_position((middle[0], middle[1]))
        rim = np.clip(place, middle - size / 2, middle + size / 2)  # where the label is nearest to the point
        if np.hypot(*(rim - place)) > 2 * MARK:
            ends = np.stack([place, rim], axis=1)
            axes.plot(ends[0], ends[1], color=LEADER, linewidth=0.7, transform=None, zorder=2)


def _renderer(axes: Axes) -> Any:
    return axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]


def _pixels(axes: Axes, points: Any) -> Floats:
    pixels: Floats = axes.transData.transform(np.asarray(points, dtype=float))
    return pixels


def _lines(axes: Axes, points: Sequence[Point]) -> Floats:
    """[k, 2, 2]: both ends, in pixels, of the bars and of the steps of the front; all run along an axis."""
    low, high = axes.get_xlim()
    bars = []
    for p in points:
        bars.append([(p.cost, p.accuracy - p.accuracy_std), (p.cost, p.accuracy + p.accuracy_std)])
        bars.append([(max(low, p.cost - p.cost_std), p.accuracy), (p.cost + p.cost_std, p.accuracy)])
    steps = _steps(points, high)
    ends = np.concatenate([np.array(bars), np.stack([steps[:-1], steps[1:]], axis=1)])
    return _pixels(axes, ends.reshape(-1, 2)).reshape(-1, 2, 2)


def spread_labels(
    points: Floats, sizes: Floats, frame: tuple[float, float, float, float], lines: Floats | None = None
) -> Floats:
    """Middles [n, 2] of labels of these sizes [n, 2] near their points [n, 2], all in pixels.

    One after the other, those with the most neighbours first, each takes the nearest place within the frame
    that covers no label and no point. To stay clear of `lines` [k, 2, 2], which run along an axis, and of lines
    that lead to labels, it goes a little further.
    """
    lines = np.empty((0, 2, 2)) if lines is None else lines
    apart = np.hypot(*(points[:, None] - points[None]).transpose(2, 0, 1))
    crowded = np.argsort(-(apart < NEIGHBOURHOOD).sum(axis=1), kind="stable")
    middles = np.full(points.shape, np.nan)
    for i in crowded:
        places, half = _around(points[i], sizes[i]), sizes[i] / 2
        done = ~np.isnan(middles[:, 0])
        outside = (places - half < frame[:2]).any(axis=1) | (places + half > frame[2:]).any(axis=1)
        taken = _covered(places, middles[done], (sizes[done] + sizes[i]) / 2 + GAP)
        covered = _covered(places, points, half + MARK)
        struck = _covered(places, lines.mean(axis=1), abs(lines[:, 1] - lines[:, 0]) / 2 + half)
        crossed = _crossed(points[i], places, points[done], middles[done])
        further = np.arange(len(places)) / DIRECTIONS
        middles[i] = places[
            np.argmin(1e6 * outside + 1e4 * taken + 100 * covered + 3 * struck + 2 * crossed + further)
        ]
    return middles


def _around(point: Floats, size: Floats) -> Floats:
    """Middles of a label [k, 2] at growing distances from its point; to the right first, then all around."""
    turns = np.arange(DIRECTIONS)
    angles = 2 * np.pi * np.where(turns % 2, turns + 1, -turns) / 2 / DIRECTIONS
    ways = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # The label's rim, not its middle, keeps the distance.
    return np.concatenate([point + ways * (reach + size / 2) for reach in REACHES])


def _covered(places: Floats, others: Floats, room: Floats) -> Any:
    """How many of the others [m, 2] come nearer to each place [k, 2] than this in both directions."""
    return (abs(places[:, None] - others[None]) < room).all(axis=2).sum(axis=1)


def _crossed(point: Floats, places: Floats, points: Floats, middles: Floats) -> Any:
    """How many lines from points [m, 2] to middles would be crossed by the one to each place [k, 2]."""

    def side(a: Floats, b: Floats, c: Floats) -> Any:
        u, v = b - a, c - a
        return np.sign(u[..., 0] * v[..., 1] - u[..., 1] * v[..., 0])

    ends = places[:, None]
    here = side(point, ends, points) * side(point, ends, middles) < 0
    there = side(points, middles, point) * side(points, middles, ends) < 0
    return (here & there).sum(axis=1)
