"""Plots as PNG bytes. Figures are drawn without pyplot, so that nothing global is left behind."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
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
from scipy.cluster.hierarchy import leaves_list, linkage
from sklearn.manifold import TSNE

from protosteer.errors import DataError
from protosteer.evaluation import metrics
from protosteer.evaluation.metrics import Matrix
from protosteer.util.text import printable

Floats = npt.NDArray[np.floating[Any]]

DPI = 110
# Okabe and Ito's colours, for lines; Tol's "muted" set, for many classes. Both hold for colour-blind readers.
LINE_COLOURS = ("#000000", "#56B4E9", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999")
LINE_MARKERS = ("s", "^", "D", "o", "v", "P", "X", "*")
LINE_STYLES = ("-", "--", ":")  # colours and markers come round again with another line
LEGEND_WIDTH = 34
ROWS_INSIDE = 4  # legends of more lines would hide some of them
CLASS_COLOURS = (
    "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#CC6677", "#999933", "#AA4499", "#777777",
)  # fmt: skip
CLASS_MARKERS = ("o", "^", "s", "v", "D", "P")  # the colours come round again with another marker
HEAT = "cividis"
NUMBER_WIDTH = 3.4  # of "100.0" with a little room, in multiples of its size
LEAST_SIZE = 4.5  # of letters, in points
MOST_TICKS = 20
PERPLEXITY = 30
# Maps of class similarity.
MAP_SIDE = 9.0  # inches, at most
LINE_HEIGHT, LETTER_WIDTH = 1.25, 0.6  # in multiples of their size
NUMBERED = 20  # classes up to which cells have numbers
NAME_LETTERS = 31
SAME = "#E4E4E4"  # a class and itself


def accuracy_matrices(matrices: Mapping[str, Matrix]) -> bytes:
    """Heat maps side by side on one colour scale: rows are moments, columns are tasks, cells are percent."""
    tasks = max(len(matrix) for matrix in matrices.values())
    lowest = min(value for matrix in matrices.values() for row in matrix for value in row)
    scale = Normalize(min(90.0, 10.0 * math.floor(lowest / 10.0)), 100.0)
    side = min(8.0, max(3.4, 0.62 * tasks))
    figure = Figure(figsize=((side + 0.7) * len(matrices) + 1.0, side + 1.2), dpi=DPI, layout="compressed")
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (name, matrix) in zip(panels, matrices.items(), strict=True):
        cells = np.full((len(matrix), len(matrix)), np.nan)
        for i, row in enumerate(matrix):
            cells[i, : i + 1] = row
        image = _heat_map(axes, cells, scale, 1, min(10.0, 72.0 * side / len(matrix) / NUMBER_WIDTH))
        numbers = _task_numbers(len(matrix))
        ticks = [number - 1 for number in numbers]
        axes.set(xticks=ticks, yticks=ticks, xticklabels=numbers, yticklabels=numbers)
        axes.set(xlabel="accuracy on test images of task", ylabel="after learning task")
        axes.spines[["top", "right"]].set_visible(False)
        end = metrics.summary(matrix)
        title = f"{name}\nLast {end['last_accuracy']:.1f} %, forgetting {end['last_forgetting']:.1f} points"
        axes.set_title(title, fontsize=11, parse_math=False)
    figure.colorbar(image, ax=list(panels), label="accuracy (%)", shrink=0.8)
    return png(figure)


def _heat_map(axes: Axes, cells: Floats, scale: Normalize, decimals: int, size: float) -> Any:
    """size: of the numbers in cells; they are left out where they would be too small."""
    for (i, j), cell in np.ndenumerate(cells):
        if size >= LEAST_SIZE and not np.isnan(cell):
            text = f"{round(float(cell), decimals) + 0.0:.{decimals}f}"  # no "-0.00"
            axes.text(j, i, text, ha="center", va="center", color=_ink(float(cell), scale), fontsize=size)
    return axes.imshow(np.ma.masked_invalid(cells), cmap=HEAT, norm=scale)


def _ink(value: float, scale: Normalize) -> str:
    """The colour that can be read on a cell."""
    red, green, blue, _ = colormaps[HEAT](scale(value))
    return "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"


def _task_numbers(tasks: int) -> range:
    """Those that an axis has room for."""
    return range(1, tasks + 1, math.ceil(tasks / MOST_TICKS))


def accuracy_curves(matrices: Mapping[str, Matrix]) -> bytes:
    """Mean accuracy over the tasks learned so far, after each task, one line per matrix."""
    return accuracy_bands({name: [matrix] for name, matrix in matrices.items()})


def accuracy_bands(rows: Mapping[str, Sequence[Matrix]]) -> bytes:
    """The same for rows of several seeds: their mean, in a band of one standard deviation to each side.

    A row's seeds are compared as far as all of them have come.
    """
    outside = len(rows) > ROWS_INSIDE
    figure = Figure(figsize=(10.4, 5.2) if outside else (7.2, 4.5), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for i, (name, matrices) in enumerate(rows.items()):
        _band(axes, i, name, matrices)
    axes.set(title="Accuracy on all classes learned so far", xlabel="tasks learned")
    axes.set_ylabel("mean accuracy over these tasks (%)")
    axes.set_xticks(_task_numbers(max(len(matrix) for matrices in rows.values() for matrix in matrices)))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    spread = any(len(matrices) > 1 for matrices in rows.values())
    title = "after the last task" + (",\n± one standard deviation over seeds" if spread else "")
    owner, place = (figure, "outside right center") if outside else (axes, "best")
    owner.legend(loc=place, frameon=False, title=title, alignment="left")
    return png(figure)


def _band(axes: Axes, i: int, name: str, matrices: Sequence[Matrix]) -> None:
    """Line number i, and its band if there is more than one matrix."""
    moments = range(min(map(len, matrices)))
    heights = np.array([[metrics.average_accuracy(matrix, k) for k in moments] for matrix in matrices])
    tasks, mean = np.arange(1, heights.shape[1] + 1), heights.mean(axis=0)
    turn, k = divmod(i, len(LINE_COLOURS))
    end = f"{mean[-1]:.1f} %"
    if len(matrices) > 1:
        std = heights.std(axis=0, ddof=1)
        end = f"{mean[-1]:.1f} ± {std[-1]:.1f} %"
        axes.fill_between(tasks, mean - std, mean + std, color=LINE_COLOURS[k], alpha=0.2, linewidth=0)
    axes.plot(
        tasks, mean, label=legend_text(name, end), linewidth=2, markersize=6 if len(tasks) <= 10 else 5,
        color=LINE_COLOURS[k], marker=LINE_MARKERS[k], linestyle=LINE_STYLES[turn % len(LINE_STYLES)],
    )  # fmt: skip


def legend_text(name: str, end: str) -> str:
    """Dollars would be set as formulas, and labels that begin with an underscore left out."""
    text = "\n".join(textwrap.wrap(f"{name}: {end}", LEGEND_WIDTH)).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def tsne_before_after(
    before: Floats,
    after: Floats,
    labels: Sequence[str],
    prototypes_before: Mapping[str, Floats],
    prototypes_after: Mapping[str, Floats],
) -> bytes:
    """Two maps of the same images, [N, D] each, with every class's prototypes [c, D] among them."""
    classes = list(dict.fromkeys([*prototypes_before, *labels]))
    columns = math.ceil(len(classes) / 10)
    figure = Figure(figsize=(11.2 + 0.9 * columns, 5.6), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    _scatter(left, before, labels, prototypes_before, classes)
    _scatter(right, after, labels, prototypes_after, classes)
    left.set_title("no prompt")
    right.set_title("CPP: under the prompt that made each image's best match")
    looks = [_look(i) for i in range(len(classes))]
    handles = [Line2D([], [], linestyle="", markersize=7, color=colour, marker=m) for colour, m in looks]
    star = Line2D([], [], linestyle="", marker="*", markersize=11, color="white", markeredgecolor="black")
    figure.legend(
        [*handles, star], [*classes, "prototype"], loc="outside right center", frameon=False, ncols=columns,
        title="class",
    )  # fmt: skip
    figure.suptitle("t-SNE of the test images' embeddings (cosine)", fontsize=12)
    return png(figure)


def _scatter(
    axes: Axes, points: Floats, labels: Sequence[str], prototypes: Mapping[str, Floats], classes: list[str]
) -> None:
    owners = [name for name, group in prototypes.items() for _ in range(len(group))]
    flat = tsne_map(np.concatenate([points, *prototypes.values()]))
    images, stars = flat[: len(points)], flat[len(points) :]
    for i, name in enumerate(classes):
        own = images[[label == name for label in labels]]
        marks = stars[[owner == name for owner in owners]]
        colour, marker = _look(i)
        axes.scatter(own[:, 0], own[:, 1], s=13, color=colour, marker=marker, linewidths=0, alpha=0.75)
        axes.scatter(
            marks[:, 0], marks[:, 1], s=130, color=colour, marker="*", edgecolors="black", linewidths=0.9, zorder=3
        )  # fmt: skip
        if len(classes) <= len(CLASS_COLOURS) and len(
            own
        ):  # so that colour is not all that tells classes apart
            x, y = np.median(own, axis=0).tolist()
            halo = [withStroke(linewidth=3, foreground="white")]
            place: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
            axes.text(x, y, name, fontsize=15, weight="bold", path_effects=halo, **place)
    axes.set(xticks=[], yticks=[])


def tsne_map(points: Floats) -> Floats:
    """[N, D] -> [N, 2]. Rows are normalised, so that distances rank as cosines do; the same at every call."""
    unit = points / np.linalg.norm(points, axis=1, keepdims=True).clip(1e-12)
    perplexity = min(PERPLEXITY, (len(unit) - 1) / 3)
    flat: Floats = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)
    return flat


def _look(i: int) -> tuple[str, str]:
    """Colour and marker of class number i."""
    turn, colour = divmod(i, len(CLASS_COLOURS))
    return CLASS_COLOURS[colour], CLASS_MARKERS[turn % len(CLASS_MARKERS)]


def class_similarity(names: Sequence[str], matrix: npt.ArrayLike, most: int = 60) -> bytes:
    """Heat map of how alike classes are, [C, C]; those that are alike stand together.

    Of more than `most` classes those are shown that have the closest neighbours.
    """
    if not names:
        raise DataError("there are no classes to draw; learn some first", code="nothing-learned")
    whole, title = np.asarray(matrix), "How alike classes are"
    chosen = np.arange(len(names))
    if len(names) > most:
        title += f"\n{most:,} of {len(names):,} classes: those with the closest neighbours"
        nearest = np.array([np.delete(row, i).max() for i, row in enumerate(whole)])
        chosen = np.sort(np.argsort(-nearest, kind="stable")[:most])
    order = chosen[_alike_together(whole[np.ix_(chosen, chosen)])]
    cells = whole[np.ix_(order, order)].astype(float)
    np.fill_diagonal(cells, np.nan)
    return png(_similarity_figure([names[i] for i in order], cells, title))


def _similarity_figure(names: Sequence[str], cells: Floats, title: str) -> Figure:
    side = min(MAP_SIDE, max(2.6, 0.45 * len(names)))
    size = min(10.0, 72.0 * side / len(names) / LINE_HEIGHT)
    labels = [short_name(name) for name in names]
    room = LETTER_WIDTH * size / 72.0 * max(map(len, labels))
    figure = Figure(figsize=(side + room + 1.6, side + room + 0.8), dpi=DPI, layout="compressed")
    axes = figure.subplots()
    image = _heat_map(axes, cells, _similarity_scale(cells), 2, 9 if len(names) <= NUMBERED else 0)
    axes.set_facecolor(SAME)
    axes.set_xticks(range(len(names)), labels, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(names)), labels, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=11)
    figure.colorbar(image, ax=axes, label="greatest cosine between centroids", shrink=0.8)
    return figure


def _alike_together(cells: Floats) -> list[int]:
    """Classes in the order of the leaves of a tree that joins the most similar ones first."""
    if len(cells) < 3:
        return list(range(len(cells)))
    distances = np.clip(1.0 - cells[np.triu_indices(len(cells), k=1)], 0.0, None)
    tree = linkage(distances, method="average", optimal_ordering=True)
    order: list[int] = leaves_list(tree).tolist()
    return order


def _similarity_scale(cells: Floats) -> Normalize:
    """From the least to the greatest similarity of two classes, in steps of 0.05, so that structure shows."""
    apart = cells[~np.isnan(cells)]
    low, high = apart.min(initial=1.0), apart.max(initial=-1.0)
    if high - low < 0.05:  # hardly more than one value: nothing to tell apart
        low, high = min(0.0, low), 1.0
    return Normalize(math.floor(20 * low) / 20, math.ceil(20 * high) / 20)


def short_name(name: str) -> str:
    """A name in one line; both ends of a long one are kept, as either may tell it from others."""
    plain = printable(name)
    half = (NAME_LETTERS - 1) // 2
    return plain if len(plain) <= NAME_LETTERS else f"{plain[:half]}…{plain[-half:]}"


def png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # boxes in the picture say so themselves
        figure.savefig(file, format="png", metadata={"Software": None})  # same figures, same bytes
    return file.getvalue()
