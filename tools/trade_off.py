"""Accuracy against the cost of training and of prediction, for prompts from layer k on, with and without cached views.

    protosteer bench training prediction --json > experiments/late_prompts/costs.json
    python tools/trade_off.py experiments/late_prompts/costs.json RUN... --out experiments/late_prompts/q3.png

Accuracies are the runs' (Last accuracy, mean and standard deviation over seeds); what was set is read from their
manifests. Costs are `protosteer bench`'s ratios, so that runs may have been made on a busy machine.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from protosteer.report.plots import DPI, LINE_COLOURS, LINE_MARKERS

Ratios = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Point:
    """One setting. Costs are relative to prompts in all layers and new views in every epoch."""

    layer: int
    views: int
    accuracies: list[float]  # one per seed
    training: float
    prediction: float

    @property
    def accuracy(self) -> float:
        return mean(self.accuracies)

    @property
    def spread(self) -> float:
        return stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def gather(runs: Sequence[Path], ratios: Ratios) -> list[Point]:
    """Points of all runs; folders that hold different seeds of one setting make one point."""
    seeds: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for run in runs:
        configuration = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["configuration"]
        settings, backbone = configuration["settings"], configuration["backbone"]["name"]
        key = (backbone, settings.get("prompt_from_layer", 1), settings.get("cached_views", 0))
        for path in sorted(run.glob("seed-*/metrics.json")):
            seeds[key].append(json.loads(path.read_text(encoding="utf-8"))["last_accuracy"])
    return [
        Point(layer, views, accuracies, *costs(ratios, backbone, layer, views))
        for (backbone, layer, views), accuracies in sorted(seeds.items())
        if accuracies
    ]


def costs(ratios: Ratios, backbone: str, layer: int, views: int) -> tuple[float, float]:
    """Of training and of prediction: our times in units of those with prompts in all layers."""
    which = f"nano_k{layer}" if backbone == "nano" else f"k{layer}"

    def cost(name: str) -> float:
        return 1 / ratios[f"{name}_{which}"]["value"]

    training = cost("cached_training") if views else cost("late_training") if layer > 1 else 1.0
    return training, cost("late_predict") if layer > 1 else 1.0


def draw(points: Sequence[Point], title: str) -> Figure:
    figure = Figure(figsize=(10.4, 4.4), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    series = [(0, "new views in every epoch"), *((n, f"{n} cached views") for n in _views(points))]
    for axes, cost in zip(panels, ("training", "prediction"), strict=True):
        for i, (views, label) in enumerate(series):
            own = [point for point in points if point.views == views]
            _series(axes, own, [getattr(point, cost) for point in own], i, label)
        axes.set_xlabel(f"time of {cost}, relative to prompts in all layers")
        axes.set_xlim(0, 1.15)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("Last accuracy (%)")
    panels[0].legend(loc="upper left", frameon=False)
    figure.suptitle(title, fontsize=12)
    return figure


def _views(points: Sequence[Point]) -> list[int]:
    return sorted({point.views for point in points} - {0})


def _series(axes: Axes, points: Sequence[Point], costs: Sequence[float], i: int, label: str) -> None:
    heights, spreads = [p.accuracy for p in points], [p.spread for p in points]
    colour = LINE_COLOURS[(3, 4)[i % 2]]
    axes.errorbar(
        costs, heights, yerr=spreads, label=label, color=colour, marker=LINE_MARKERS[3 + i], capsize=3, linewidth=1.5
    )  # fmt: skip
    for point, cost in zip(points, costs, strict=True):
        above = 8 if i == 0 else -14
        axes.annotate(
            f"k = {point.layer}", (cost, point.accuracy), xytext=(5, above), textcoords="offset points", color=colour
        )  # fmt: skip


def table(points: Sequence[Point]) -> str:
    lines = [
        "| prompts from layer | cached views | seeds | Last accuracy | training time | prediction time |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for p in sorted(points, key=lambda p: (p.views, p.layer)):
        accuracy = f"{p.accuracy:.2f} ± {p.spread:.2f}" if len(p.accuracies) > 1 else f"{p.accuracy:.2f}"
        lines.append(
            f"| {p.layer} | {p.views or 'none'} | {len(p.accuracies)} | {accuracy} | {p.training:.2f} | {p.prediction:.2f} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("costs", type=Path, help="what `protosteer bench --json` printed")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders of one stream and backbone")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    options = parser.parse_args(words)
    ratios = json.loads(options.costs.read_text(encoding="utf-8"))["ratios"]
    points = gather(options.runs, ratios)
    figure = draw(points, options.title)
    FigureCanvasAgg(figure)
    figure.savefig(options.out, format="png")
    print(table(points))


if __name__ == "__main__":
    main()
