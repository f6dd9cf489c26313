"""What prediction costs beside the backbone as classes grow, as a picture.

python tools/plot_scaling.py --out docs/images/scaling.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from protosteer.bench.scaling import Point, curve
from protosteer.report.plots import DPI, LINE_COLOURS


def draw(points: Sequence[Point]) -> Figure:
    """Milliseconds per image over the number of classes, both axes in powers of ten."""
    figure = Figure(figsize=(6.4, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    classes = [point.classes for point in points]
    for i, name, label in ((3, "backbone", "backbone"), (4, "overhead", "all the rest")):
        heights = [1000 * median(getattr(point, name)) for point in points]
        axes.plot(classes, heights, marker="o", linewidth=2, color=LINE_COLOURS[i], label=label)
    limit = [0.05 * 1000 * median(point.backbone) for point in points]
    axes.plot(classes, limit, linestyle=":", color="black", linewidth=1.2, label="5 % of the backbone's time")
    for point in points:
        place = (point.classes, 1000 * median(point.overhead))
        text = f"{point.tasks:,} tasks"
        axes.annotate(text, place, xytext=(0, -15), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="milliseconds an image")
    axes.set_title("Cost of a prediction, ViT-Ti/16 at 224 px, five centroids per class")
    axes.grid(alpha=0.3)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    options = parser.parse_args(words)
    points = curve(options.repeats)
    figure = draw(points)
    FigureCanvasAgg(figure)
    figure.savefig(options.out, format="png")
    print("\n".join(str(point) for point in points))


if __name__ == "__main__":
    main()
