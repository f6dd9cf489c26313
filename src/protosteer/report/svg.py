"""Charts as plain SVG for HTML pages: lines with bands, heat maps, bars, reliability, scatter.

Colours are CSS variables of `page.css`, so that a chart follows light and dark mode. Elements with `data-tip` show
their value on hover.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    def places(self) -> list[tuple[int, float, float]]:
        """Return number, height and spread of each value."""
        spread = self.spread or [0.0] * len(self.values)
        return [(i, value, spread[i]) for i, value in enumerate(self.values) if value is not None]


def line_chart(series: Sequence[Series], x_title: str, y_title: str, zero: bool = False) -> str:
    """Draw lines over 1, 2, 3 ..., with bands; nothing if there is no value."""
    points = [place for line in series for place in line.places()]
    if not points:
        return ""
    low, high, step = nice_range(min(v - s for _, v, s in points), max(v + s for _, v, s in points), zero)
    count = max(len(line.values) for line in series)

    def x(i: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / count

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    marks = [low + k * step for k in range(round((high - low) / step) + 1)]
    parts = [_grid_lines(marks, y, WIDTH), _x_axis(count, x, x_title), _y_title(y_title)]
    for number, line in enumerate(series):
        style, places = _style(number), line.places()
        if any(spread for *_, spread in places):
            edges = [(x(i), y(v + s)) for i, v, s in places] + [(x(i), y(v - s)) for i, v, s in reversed(places)]
            parts.append(f'<polygon class="band {style}" points="{_points(edges)}"/>')
        path = _points([(x(i), y(value)) for i, value, _ in places])
        parts.append(f'<polyline class="line {style}" points="{path}"/>')
        for i, value, spread in places:
            deviation = f" ± {spread:.2f}" if spread else ""
            parts.append(_dot(x(i), y(value), 4, style, f"{line.name}, {x_title} {i + 1}: {value:,.2f}{deviation}"))
    chart = _svg(WIDTH, HEIGHT, "".join(parts), y_title, "wide")
    return chart + (legend([line.name for line in series]) if len(series) > 1 else "")


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
        parts.append(_text(margin - 6, top + side / 2 + 4, rows[i], "end"))
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
                number = f"{value:.{decimals}f}"
                parts.append(_text(left + side / 2 - 0.5, top + side / 2 + 4, number, kind=f"cell t{step}"))
    stride = math.ceil(len(columns) / max(1, int(560 / (7.0 * max(map(len, columns), default=1) + 6))))
    base = 6 + side * len(rows) + 14
    parts += (_text(margin + (j + 0.5) * side, base, columns[j]) for j in range(0, len(columns), stride))
    parts.append(_text(margin, base + 20, f"{titles[1]} (columns), {titles[0]} (rows)", "start"))
    return _svg(max(width, margin + 240), height, "".join(parts), f"{titles[0]} and {titles[1]}")


def reliability_chart(rows: Mapping[str, Bins]) -> str:
    """Draw the accuracy of each bin at its mean confidence; the area of a dot grows with its share of the images."""
    size = HEIGHT + 60

    def place(value: float) -> float:
        return LEFT + (size - LEFT - RIGHT) * value / 100.0

    def y(value: float) -> float:
        return TOP + (size - TOP - BOTTOM) * (100.0 - value) / 100.0

    marks = range(0, 101, 20)
    parts = [
        f'<line class="diagonal" x1="{place(0)}" y1="{y(0):.1f}" x2="{place(100):.1f}" y2="{y(100)}"/>',
        _grid_lines(marks, y, size),
        *(_text(place(mark), size - BOTTOM + 18, str(mark)) for mark in marks),
    ]
    for number, (name, bins) in enumerate(rows.items()):
        total = sum(b["images"] for b in bins)
        occupied_bins = [b for b in bins if b["images"]]
        points = [(place(b["confidence"]), y(b["accuracy"])) for b in occupied_bins]
        parts.append(f'<polyline class="line {_style(number)}" points="{_points(points)}"/>')
        for b, point in zip(occupied_bins, points, strict=True):
            figures = f"confidence {b['confidence']:.1f} %, accuracy {b['accuracy']:.1f} %, {b['images']:,} images"
            radius = 3 + 9 * math.sqrt(b["images"] / total)
            parts.append(_dot(*point, radius, _style(number), f"{name or 'all'}: {figures}"))
    parts.append(_text(size / 2, size - 6, "confidence (%)"))
    chart = _svg(size, size, "".join(parts) + _y_title("accuracy (%)", size), "Reliability")
    return chart + (legend(list(rows)) if len(rows) > 1 else "")


def scatter(points: Sequence[tuple[float, float]], labels: Sequence[str], title: str) -> str:
    """Draw a map of images [N, 2], a colour per label; up to `MAX_NAMED` labels are written on it."""
    size = 420.0
    names = list(dict.fromkeys(labels))
    xs, ys = _scale([p[0] for p in points], size), _scale([p[1] for p in points], size)
    parts = [
        _dot(a, b, 3, f"small s{names.index(label) % SERIES}", label)
        for a, b, label in zip(xs, ys, labels, strict=True)
    ]
    for name in names if len(names) <= MAX_NAMED else ():
        members = [i for i, label in enumerate(labels) if label == name]
        x, y = (statistics.median(places[i] for i in members) for places in (xs, ys))
        parts.append(_text(x, y + 5, name, kind="name"))
    return _svg(size, size, "".join(parts), title)


def _scale(values: Sequence[float], size: float) -> list[float]:
    low, span = min(values), (max(values) - min(values)) or 1.0
    return [10 + (size - 20) * (value - low) / span for value in values]


def legend(names: Sequence[str]) -> str:
    """Return the names of lines with their colours."""
    items = (f'<span class="key"><i class="{_style(i)}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{"".join(items)}</p>'


def nice_range(low: float, high: float, zero: bool = False) -> tuple[float, float, float]:
    """Return a range in round numbers around two values, and the step between grid lines."""
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    span = (high - low) or abs(high) * 0.1 or 1.0
    target = span / 5
    size = 10 ** math.floor(math.log10(target))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= target)
    bottom, top = math.floor(low / step) * step, math.ceil(high / step) * step
    return bottom, top if top > bottom else bottom + step, step


def _grid_lines(marks: Sequence[float], y: Callable[[float], float], width: float) -> str:
    """Draw a horizontal line with its number at each mark."""
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
        + _text(LEFT - 6, y(mark) + 4, _abbreviate(mark), "end")
        for mark in marks
    )


def _x_axis(count: int, x: Callable[[float], float], title: str) -> str:
    """Number the places 1, 2, 3 ..., at most MAX_TICKS of them."""
    numbers = range(0, count, math.ceil(count / MAX_TICKS))
    ticks = (_text(x(i), HEIGHT - BOTTOM + 18, str(i + 1)) for i in numbers)
    return "".join(ticks) + _text(WIDTH / 2, HEIGHT - 4, title)


def _y_title(text: str, height: float = HEIGHT) -> str:
    return f'<text class="tick" transform="translate(12 {height / 2}) rotate(-90)" text-anchor="middle">{escape(text)}</text>'


def _abbreviate(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:g}{unit}"
    return f"{round(value, 6):g}"


def _text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _dot(x: float, y: float, radius: float, style: str, tip: str) -> str:
    return f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" {_tip(tip)}/>'


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _style(number: int) -> str:
    """Return the classes of line number i: a colour, and dashes once colours repeat."""
    return f"s{number % SERIES}" + (" dashed" if number >= SERIES else "")


def _tip(text: str) -> str:
    return f'data-tip="{escape(text)}"'


def _svg(width: float, height: float, content: str, title: str, kind: str = "") -> str:
    """Return a drawing; one of the kind "wide" gets larger letters on a phone, where it shrinks most."""
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px"'
    return f'<svg class="{kind}" {box} role="img" aria-label="{escape(title)}">{content}</svg>'
