"""Plots as PNG bytes. Figures are drawn without pyplot, so that nothing global is left behind."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from sklearn.manifold import TSNE

from protosteer.evaluation import metrics
from protosteer.evaluation.metrics import Matrix

Floats = npt.NDArray[np.floating[Any]]

DPI = 110
# Okabe and Ito's colours, for lines; Tol's "muted" set, for many classes. Both hold for colour-blind readers.
LINE_COLOURS = ("#000000", "#56B4E9", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999")
LINE_MARKERS = ("s", "^", "D", "o", "v", "P", "X", "*")
CLASS_COLOURS = (
    "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#CC6677", "#999933", "#AA4499", "#777777",
)  # fmt: skip
CLASS_MARKERS = ("o", "^", "s", "v", "D", "P")  # the colours come round again with another marker
HEAT = "cividis"
PERPLEXITY = 30


def accuracy_matrices(matrices: Mapping[str, Matrix]) -> bytes:
    """Heat maps side by side on one colour scale: rows are moments, columns are tasks, cells are percent."""
    tasks = max(len(matrix) for matrix in matrices.values())
    lowest = min(value for matrix in matrices.values() for row in matrix for value in row)
    scale = Normalize(min(90.0, 10.0 * math.floor(lowest / 10.0)), 100.0)
    side = min(8.0, max(3.4, 0.62 * tasks))
    figure = Figure(figsize=((side + 0.7) * len(matrices) + 1.0, side + 1.2), dpi=DPI, layout="compressed")
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (name, matrix) in zip(panels, matrices.items(), strict=True):
        image = _heat_map(axes, matrix, scale)
        end = metrics.summary(matrix)
        title = f"{name}\nLast {end['last_accuracy']:.1f} %, forgetting {end['last_forgetting']:.1f} points"
        axes.set_title(title, fontsize=11)
    figure.colorbar(image, ax=list(panels), label="accuracy (%)", shrink=0.8)
    return _png(figure)


def _heat_map(axes: Axes, matrix: Matrix, scale: Normalize) -> Any:
    tasks = len(matrix)
    cells = np.full((tasks, tasks), np.nan)
    size = max(4.5, min(10.0, 75.0 / tasks))
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            cells[i, j] = value
            red, green, blue, _ = colormaps[HEAT](scale(value))
            ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=ink, fontsize=size)
    image = axes.imshow(np.ma.masked_invalid(cells), cmap=HEAT, norm=scale)
    axes.set_xticks(range(tasks), [str(i + 1) for i in range(tasks)])
    axes.set_yticks(range(tasks), [str(i + 1) for i in range(tasks)])
    axes.set_xlabel("accuracy on test images of task")
    axes.set_ylabel("after learning task")
    axes.spines[["top", "right"]].set_visible(False)
    return image


def accuracy_curves(matrices: Mapping[str, Matrix]) -> bytes:
    """Mean accuracy over the tasks learned so far, after each task, one line per matrix."""
    figure = Figure(figsize=(7.2, 4.5), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    longest = max(len(matrix) for matrix in matrices.values())
    for i, (name, matrix) in enumerate(matrices.items()):
        heights = [metrics.average_accuracy(matrix, k) for k in range(len(matrix))]
        axes.plot(
            range(1, len(matrix) + 1), heights, label=f"{name}: {heights[-1]:.1f} %", linewidth=2,
            color=LINE_COLOURS[i % len(LINE_COLOURS)], marker=LINE_MARKERS[i % len(LINE_MARKERS)],
        )  # fmt: skip
    axes.set_title("Accuracy on all classes learned so far")
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("mean accuracy over these tasks (%)")
    axes.set_xticks(range(1, longest + 1))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", title="after the last task")
    return _png(figure)


def tsne_before_after(
    before: Floats,
    after: Floats,
    labels: Sequence[str],
    prototypes_before: Mapping[str, Floats],
    prototypes_after: Mapping[str, Floats],
    titles: tuple[str, str] = ("before: no prompt", "after: with prompts"),
) -> bytes:
    """Two maps of the same images, [N, D] each, with every class's prototypes [c, D] among them."""
    classes = list(dict.fromkeys([*prototypes_before, *labels]))
    columns = math.ceil(len(classes) / 10)
    figure = Figure(figsize=(11.2 + 0.9 * columns, 5.6), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2)
    sides = ((before, prototypes_before), (after, prototypes_after))
    for axes, title, (points, prototypes) in zip(panels, titles, sides, strict=True):
        _scatter(axes, points, labels, prototypes, classes)
        axes.set_title(title)
    handles = [_handle(classes, name) for name in classes]
    star = Line2D([], [], linestyle="", marker="*", markersize=11, color="white", markeredgecolor="black")
    figure.legend(
        [*handles, star], [*classes, "prototype"], loc="outside right center", frameon=False, ncols=columns,
        title="class",
    )  # fmt: skip
    figure.suptitle("t-SNE of the test images' embeddings (cosine)", fontsize=12)
    return _png(figure)


def _scatter(
    axes: Axes, points: Floats, labels: Sequence[str], prototypes: Mapping[str, Floats], classes: list[str]
) -> None:
    owners = [name for name, group in prototypes.items() for _ in range(len(group))]
    flat = tsne_map(np.concatenate([points, *prototypes.values()]))
    images, stars = flat[: len(points)], flat[len(points) :]
    for name in classes:
        own = images[[label == name for label in labels]]
        marks = stars[[owner == name for owner in owners]]
        colour, marker = _look(classes, name)
        axes.scatter(own[:, 0], own[:, 1], s=13, color=colour, marker=marker, linewidths=0, alpha=0.75)
        axes.scatter(
            marks[:, 0], marks[:, 1], s=130, color=colour, marker="*", edgecolors="black", linewidths=0.9, zorder=3
        )  # fmt: skip
        if len(classes) <= len(CLASS_COLOURS) and len(own):
            _name(axes, name, np.median(own, axis=0))
    axes.set_xticks([])
    axes.set_yticks([])


def _name(axes: Axes, name: str, place: Floats) -> None:
    """The class's name amid its images, so that colour is not all that tells classes apart."""
    halo = [withStroke(linewidth=3, foreground="white")]
    x, y = place.tolist()
    axes.text(x, y, name, fontsize=15, weight="bold", ha="center", va="center", zorder=4, path_effects=halo)


def tsne_map(points: Floats) -> Floats:
    """[N, D] -> [N, 2]. Rows are normalised, so that distances rank as cosines do; the same at every call."""
    unit = points / np.linalg.norm(points, axis=1, keepdims=True).clip(1e-12)
    perplexity = min(PERPLEXITY, (len(unit) - 1) / 3)
    flat: Floats = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)
    return flat


def _handle(classes: list[str], name: str) -> Line2D:
    colour, marker = _look(classes, name)
    return Line2D([], [], linestyle="", marker=marker, markersize=7, color=colour)


def _look(classes: list[str], name: str) -> tuple[str, str]:
    turn, colour = divmod(classes.index(name), len(CLASS_COLOURS))
    return CLASS_COLOURS[colour], CLASS_MARKERS[turn % len(CLASS_MARKERS)]


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})  # no version: same figures, same bytes
    return file.getvalue()
