"""Charts as plain SVG for HTML pages: lines with bands, heat maps, bars, reliability, scatter.

Colours are CSS variables of `html.STYLE`, so that a chart follows light and dark mode. Elements with `data-tip` show
their value on hover.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from protosteer.util.statistics import Bins

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 14, 46
SERIES = 8  # colours; then lines are dashed
HEAT_STEPS = 10
MAX_TICKS = 12
MAX_NAMED = 20  # labels on a scatter plot


@dataclass(frozen=True)
class Series:
    """A line: its heights, and how far the band reaches above and below; None leaves a gap."""

    name: str
    values: Sequence[float | None]
    spread: Sequence[float] | None = None


def line_chart(
    series: Sequence[Series], x_title: str, y_title: str, ticks: Sequence[str] | None = None, zero: bool = False
) -> str:
    """Draw lines over 1, 2, 3 ..., or over the ticks given, with bands; nothing if there is no value."""
    known = [
        value + sign * (one.spread[i] if one.spread else 0.0)
        for one in series
        for i, value in enumerate(one.values)
        if value is not None
        for sign in (-1, 1)
    ]
    if not known:
        return ""
    low, high, step = nice_range(min(known), max(known), zero)
    count = max(len(one.values) for one in series)
    names = list(ticks or map(str, range(1, count + 1)))

    def x(i: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / count

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [_grid_lines(low, high, step, y), _x_axis(names, x, x_title), _y_title(y_title)]
    for number, one in enumerate(series):
        style = f"s{number % SERIES}" + (" dashed" if number >= SERIES else "")
        places = [(x(i), y(v), v) for i, v in enumerate(one.values) if v is not None]
        if one.spread and any(one.spread):
            edges = [(i, v, one.spread[i]) for i, v in enumerate(one.values) if v is not None]
            above = [f"{x(i):.1f},{y(v + s):.1f}" for i, v, s in edges]
            below = [f"{x(i):.1f},{y(v - s):.1f}" for i, v, s in reversed(edges)]
            parts.append(f'<polygon class="band {style}" points="{" ".join(above + below)}"/>')
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in places)
        parts.append(f'<polyline class="line {style}" points="{line}"/>')
        for i, value in enumerate(one.values):
            if value is not None:
                spread = f" ± {one.spread[i]:.2f}" if one.spread and one.spread[i] else ""
                tip = _tip(f"{one.name}, {x_title} {names[i]}: {value:,.2f}{spread}")
                parts.append(f'<circle class="dot {style}" cx="{x(i):.1f}" cy="{y(value):.1f}" r="4" {tip}/>')
    chart = _svg(WIDTH, HEIGHT, "".join(parts), y_title, "wide")
    return chart + (legend([one.name for one in series]) if len(series) > 1 else "")


def heat_map(
    cells: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    titles: tuple[str, str],
    low: float = 0.0,
    high: float = 100.0,
    decimals: int = 1,
) -> str:
    """Draw numbers in coloured cells; of large maps only the colours, with values on hover."""
    side = max(14.0, min(46.0, 560.0 / max(1, len(columns))))
    margin = 12.0 + 6.6 * max((len(name) for name in rows), default=1)
    width, height = margin + side * len(columns) + 4, 22 + side * len(rows) + 34
    parts = []
    for i, line in enumerate(cells):
        top = 6 + i * side
        parts.append(
            f'<text class="tick" x="{margin - 6:.1f}" y="{top + side / 2 + 4:.1f}" text-anchor="end">{escape(rows[i])}</text>'
        )
        for j, value in enumerate(line):
            if value is None:
                continue
            step = round((HEAT_STEPS - 1) * min(1.0, max(0.0, (value - low) / (high - low or 1.0))))
            left = margin + j * side
            tip = _tip(f"{titles[0]} {rows[i]}, {titles[1]} {columns[j]}: {value:,.{decimals}f}")
            parts.append(
                f'<rect class="h{step}" x="{left:.1f}" y="{top:.1f}" width="{side - 1:.1f}" height="{side - 1:.1f}" {tip}/>'
            )
            if side >= 30:
                middle = f'x="{left + side / 2 - 0.5:.1f}" y="{top + side / 2 + 4:.1f}"'
                parts.append(f'<text class="cell t{step}" {middle} text-anchor="middle">{value:.{decimals}f}</text>')
    every = math.ceil(len(columns) / max(1, int(560 / (7.0 * max(map(len, columns), default=1) + 6))))
    base = 6 + side * len(rows) + 14
    for j in range(0, len(columns), every):
        parts.append(
            f'<text class="tick" x="{margin + (j + 0.5) * side:.1f}" y="{base:.1f}" text-anchor="middle">{escape(columns[j])}</text>'
        )
    parts.append(
        f'<text class="tick" x="{margin:.1f}" y="{base + 20:.1f}">{escape(titles[1])} (columns), {escape(titles[0])} (rows)</text>'
    )
    return _svg(max(width, margin + 240), height, "".join(parts), f"{titles[0]} and {titles[1]}")


def reliability_chart(rows: Mapping[str, Bins]) -> str:
    """Draw the accuracy of each bin at its mean confidence; the area of a dot grows with its share of the images."""
    size = HEIGHT + 60

    def place(value: float) -> float:
        return LEFT + (size - LEFT - RIGHT) * value / 100.0

    def y(value: float) -> float:
        return TOP + (size - TOP - BOTTOM) * (100.0 - value) / 100.0

    parts = [f'<line class="diagonal" x1="{place(0)}" y1="{y(0):.1f}" x2="{place(100):.1f}" y2="{y(100)}"/>']
    for mark in range(0, 101, 20):
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark}</text>')
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{size - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        parts.append(
            f'<text class="tick" x="{place(mark):.1f}" y="{size - BOTTOM + 18}" text-anchor="middle">{mark}</text>'
        )
    for number, (name, bins) in enumerate(rows.items()):
        total = sum(b["images"] for b in bins)
        filled = [b for b in bins if b["images"]]
        points = " ".join(f"{place(b['confidence']):.1f},{y(b['accuracy']):.1f}" for b in filled)
        parts.append(f'<polyline class="line s{number % SERIES}" points="{points}"/>')
        for b in filled:
            share = b["images"] / total
            tip = _tip(
                f"{name or 'all'}: confidence {b['confidence']:.1f} %, accuracy {b['accuracy']:.1f} %, {b['images']:,} images"
            )
            at = f'cx="{place(b["confidence"]):.1f}" cy="{y(b["accuracy"]):.1f}" r="{3 + 9 * math.sqrt(share):.1f}"'
            parts.append(f'<circle class="dot s{number % SERIES}" {at} {tip}/>')
    parts.append(f'<text class="tick" x="{size / 2}" y="{size - 6}" text-anchor="middle">confidence (%)</text>')
    chart = _svg(size, size, "".join(parts) + _y_title("accuracy (%)", size), "Reliability")
    return chart + (legend(list(rows)) if len(rows) > 1 else "")


def scatter(points: Sequence[tuple[float, float]], labels: Sequence[str], title: str) -> str:
    """Draw a map of images [N, 2], a colour per label; up to `MAX_NAMED` labels are written on it."""
    size = 420.0
    names = list(dict.fromkeys(labels))
    xs, ys = _scaled([p[0] for p in points], size), _scaled([p[1] for p in points], size)
    parts = [
        f'<circle class="dot small s{names.index(label) % SERIES}" cx="{a:.1f}" cy="{b:.1f}" r="3" {_tip(label)}/>'
        for a, b, label in zip(xs, ys, labels, strict=True)
    ]
    for name in names if len(names) <= MAX_NAMED else ():
        own = [i for i, label in enumerate(labels) if label == name]
        at = (statistics.median(xs[i] for i in own), statistics.median(ys[i] for i in own))
        parts.append(
            f'<text class="name" x="{at[0]:.1f}" y="{at[1] + 5:.1f}" text-anchor="middle">{escape(name)}</text>'
        )
    return _svg(size, size, "".join(parts), title)


def _scaled(values: Sequence[float], size: float) -> list[float]:
    low, span = min(values), (max(values) - min(values)) or 1.0
    return [10 + (size - 20) * (value - low) / span for value in values]


def legend(names: Sequence[str]) -> str:
    """Return the names of lines with their colours."""
    items = (
        f'<span class="key"><i class="s{i % SERIES}{" dashed" if i >= SERIES else ""}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def nice_range(low: float, high: float, zero: bool = False) -> tuple[float, float, float]:
    """Return a range in round numbers around two values, and the step between grid lines."""
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    span = (high - low) or abs(high) * 0.1 or 1.0
    raw = span / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    first, last = math.floor(low / step) * step, math.ceil(high / step) * step
    return first, last if last > first else first + step, step


def _grid_lines(low: float, high: float, step: float, y: Callable[[float], float]) -> str:
    parts = []
    for k in range(round((high - low) / step) + 1):
        value = low + k * step
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_short(value)}</text>'
        )
    return "".join(parts)


def _x_axis(names: Sequence[str], x: Callable[[float], float], title: str) -> str:
    every = math.ceil(len(names) / MAX_TICKS)
    ticks = (
        f'<text class="tick" x="{x(i):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(names[i])}</text>'
        for i in range(0, len(names), every)
    )
    return (
        "".join(ticks)
        + f'<text class="tick" x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(title)}</text>'
    )


def _y_title(text: str, height: float = HEIGHT) -> str:
    return f'<text class="tick" transform="translate(12 {height / 2}) rotate(-90)" text-anchor="middle">{escape(text)}</text>'


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:g}{unit}"
    return f"{round(value, 6):g}"


def _tip(text: str) -> str:
    return f'data-tip="{escape(text)}"'


def _svg(width: float, height: float, content: str, title: str, kind: str = "") -> str:
    """Return a drawing; one of the kind "wide" gets larger letters on a phone, where it shrinks most."""
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px"'
    return f'<svg class="{kind}" {box} role="img" aria-label="{escape(title)}">{content}</svg>'
