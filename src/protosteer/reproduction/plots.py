"""Plots of results in the paper's layout: bars for tables, a heat map, lines over a setting, curves over tasks."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protosteer.report.model_summary import human_bytes
from protosteer.report.plots import DPI, draw_band, heat_cells, line_style, png
from protosteer.reproduction.definition import Line
from protosteer.reproduction.results import Number, Result, decimals_of, heading

OURS, PAPER = "#0072B2", "#D55E00"


def draw_bars(result: Result) -> bytes:
    """Draw a panel per column and metric: a bar per row, and a mark where the paper's number is."""
    rows, metrics, columns = result.rows(), result.definition.metrics, _columns_with_numbers(result)
    size = (4.4 * len(columns) + 1.6, (0.32 * len(rows) + 1.1) * len(metrics) + 0.5)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    panels = figure.subplots(len(metrics), len(columns), squeeze=False, sharey=True)
    for (metric, title), line in zip(metrics.items(), panels, strict=True):
        for column, axes in zip(columns, line, strict=True):
            numbers = [result.number(row, column, metric) for row in rows]
            _draw_bar_panel(axes, numbers, in_bytes=decimals_of(metric) == 0)
            axes.set_yticks(range(len(rows)), [heading(row, result.scale) for row in rows])
            name = heading(column, result.scale)
            axes.set_title(f"{name}\n{title}" if name else title, fontsize=10)
    panels[0][0].invert_yaxis()
    return _finish(figure, result)


def _columns_with_numbers(result: Result) -> list[Line]:
    column_keys, columns = {number.column for number in result.numbers.values()}, result.definition.columns
    return [column for column in columns if column.key in column_keys] or list(columns[:1])


def _draw_bar_panel(axes: Axes, numbers: list[Number], in_bytes: bool) -> None:
    if in_bytes:  # from hundreds to millions
        sizes = [number.mean for number in numbers if number.mean]
        axes.set_xscale("log")
        axes.set_xlim(min(sizes, default=1) / 3, 3 * max(sizes, default=1))
    for y, number in enumerate(numbers):
        if number.mean is not None:
            axes.barh(y, number.mean, xerr=number.std, height=0.6, color=OURS, alpha=0.85, label="ours")
            words = human_bytes(number.mean) if in_bytes else f"{number.mean:.{decimals_of(number.metric)}f}"
            axes.annotate(words, (number.mean, y), (4, 5), textcoords="offset points", fontsize=7)
        if number.paper is not None:
            axes.plot([number.paper], [y], marker="D", color=PAPER, linestyle="", label="the paper's")
    axes.margins(x=0.12)  # for the words beside the longest bar
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_heat_map(result: Result) -> bytes:
    """Draw a heat map of rows by columns for each metric."""
    metrics, columns, rows = result.definition.metrics, result.definition.columns, result.rows()
    size = (1.1 * len(columns) * len(metrics) + 2.4, 0.7 * len(rows) + 1.6)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, (metric, title) in zip(panels, metrics.items(), strict=True):
        means = [[result.number(row, column, metric).mean for column in columns] for row in rows]
        cells = np.array(means, dtype=float)  # None becomes NaN
        values = cells[~np.isnan(cells)]
        scale = Normalize(values.min(initial=100.0), max(values.max(initial=0.0), values.min(initial=100.0) + 0.1))
        heat_cells(axes, cells, scale, 2, 9.0)
        axes.set_xticks(range(len(columns)), [column.title for column in columns])
        axes.set_yticks(range(len(rows)), [row.title for row in rows])
        axes.set_title(title, fontsize=10)
    return _finish(figure, result)


def draw_lines(result: Result) -> bytes:
    """Draw a panel per metric: a line per row over the columns."""
    metrics, columns = result.definition.metrics, result.definition.columns
    figure = Figure(figsize=(5.2 * len(metrics) + 0.6, 4.0), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, (metric, title) in zip(panels, metrics.items(), strict=True):
        for i, row in enumerate(result.rows()):
            numbers = [result.number(row, column, metric) for column in columns]
            heights = np.array([number.mean for number in numbers], dtype=float)  # None becomes NaN
            deviations = [number.std or 0.0 for number in numbers]
            axes.errorbar(range(len(columns)), heights, yerr=deviations, capsize=3, label=row.title, **line_style(i))
        axes.set_xticks(range(len(columns)), [column.title for column in columns])
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return _finish(figure, result)


def draw_curves(result: Result) -> bytes:
    """Draw a panel per column: the accuracy after each task, a line per row."""
    columns = result.definition.columns
    figure = Figure(figsize=(4.6 * len(columns), 4.0), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axes, column in zip(panels, columns, strict=True):
        for i, row in enumerate(result.rows()):
            if (row.key, column.key) in result.curves:
                draw_band(axes, i, row.title, result.curves[row.key, column.key])
        axes.set(title=heading(column, result.scale), xlabel="tasks learned")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("mean accuracy over these tasks (%)")
    return _finish(figure, result, legend=False)


def _finish(figure: Figure, result: Result, legend: bool = True) -> bytes:
    title = f"{result.definition.title}\n{result.definition.source}, scale {result.scale.name}"
    figure.suptitle(title, fontsize=11)
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if legend and entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False)
    return png(figure)


PLOTS = {"bars": draw_bars, "heat": draw_heat_map, "lines": draw_lines, "curves": draw_curves}
