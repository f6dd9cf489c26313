"""Draw plots as PNG bytes, without pyplot and its global state."""

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
# Okabe and Ito's colours for lines, Tol's "muted" set for classes; both suit colour-blind readers.
LINE_COLOURS = ("#000000", "#56B4E9", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999")
LINE_MARKERS = ("s", "^", "D", "o", "v", "P", "X", "*")
LINE_STYLES = ("-", "--", ":")  # repeated colours and markers get another line style
LEGEND_WIDTH = 34
MAX_LEGEND_INSIDE = 4  # a longer legend would hide lines
CLASS_COLOURS = (
    "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#CC6677", "#999933", "#AA4499", "#777777",
)  # fmt: skip
CLASS_MARKERS = ("o", "^", "s", "v", "D", "P")  # repeated colours get another marker
HEAT = "cividis"
NUMBER_WIDTH = 3.4  # of "100.0" with margins, in multiples of its font size
MIN_FONT_SIZE = 4.5
MAX_TICKS = 20
PERPLEXITY = 30
# Maps of class similarity.
MAX_MAP_SIDE = 9.0  # inches
LINE_HEIGHT, LETTER_WIDTH = 1.25, 0.6  # in multiples of the font size
MAX_NUMBERED = 20  # classes up to which cells have numbers
NAME_LETTERS = 31
DIAGONAL_COLOUR = "#E4E4E4"


def accuracy_matrices(matrices: Mapping[str, Matrix]) -> bytes:
    """Draw accuracy matrices (percent; row i is after task i, column j is task j) side by side on one colour scale."""
    tasks = max(len(matrix) for matrix in matrices.values())
    minimum = min(value for matrix in matrices.values() for row in matrix for value in row)
    scale = Normalize(min(90.0, 10.0 * math.floor(minimum / 10.0)), 100.0)
    side = min(8.0, max(3.4, 0.62 * tasks))
    figure = Figure(figsize=((side + 0.7) * len(matrices) + 1.0, side + 1.2), dpi=DPI, layout="compressed")
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (name, matrix) in zip(panels, matrices.items(), strict=True):
        cells = np.full((len(matrix), len(matrix)), np.nan)
        for i, row in enumerate(matrix):
            cells[i, : i + 1] = row
        image = heat_cells(axes, cells, scale, 1, min(10.0, 72.0 * side / len(matrix) / NUMBER_WIDTH))
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


def heat_cells(axes: Axes, cells: Floats, scale: Normalize, decimals: int, size: float) -> Any:
    """Draw cells with numbers of this font size, or without numbers if that is too small."""
    for (i, j), cell in np.ndenumerate(cells):
        if size >= MIN_FONT_SIZE and not np.isnan(cell):
            text = f"{round(float(cell), decimals) + 0.0:.{decimals}f}"  # no "-0.00"
            axes.text(j, i, text, ha="center", va="center", color=_ink(float(cell), scale), fontsize=size)
    return axes.imshow(np.ma.masked_invalid(cells), cmap=HEAT, norm=scale)


def _ink(value: float, scale: Normalize) -> str:
    """Return black or white, whichever is legible on a cell."""
    red, green, blue, _ = colormaps[HEAT](scale(value))
    return "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"


def _task_numbers(tasks: int) -> range:
    """Return the task numbers for an axis: at most `MAX_TICKS`."""
    return range(1, tasks + 1, math.ceil(tasks / MAX_TICKS))


def accuracy_curves(matrices: Mapping[str, Matrix]) -> bytes:
    """Draw the mean accuracy over the tasks learned so far, after each task, one line per matrix."""
    return accuracy_bands({name: [matrix] for name, matrix in matrices.items()})


def accuracy_bands(rows: Mapping[str, Sequence[Matrix]]) -> bytes:
    """Draw the mean accuracy curve of several runs, in a band of one standard deviation.

    Only tasks that all runs of a row have learned are drawn.
    """
    is_outside = len(rows) > MAX_LEGEND_INSIDE
    figure = Figure(figsize=(10.4, 5.2) if is_outside else (7.2, 4.5), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for i, (name, matrices) in enumerate(rows.items()):
        draw_band(axes, i, name, matrices)
    axes.set(title="Accuracy on all classes learned so far", xlabel="tasks learned")
    axes.set_ylabel("mean accuracy over these tasks (%)")
    axes.set_xticks(_task_numbers(max(len(matrix) for matrices in rows.values() for matrix in matrices)))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    spread = any(len(matrices) > 1 for matrices in rows.values())
    title = "after the last task" + (",\n± one standard deviation over runs" if spread else "")
    owner, location = (figure, "outside right center") if is_outside else (axes, "best")
    owner.legend(loc=location, frameon=False, title=title, alignment="left")
    return png(figure)


def draw_band(axes: Axes, i: int, name: str, matrices: Sequence[Matrix]) -> None:
    """Draw line number i, and its band if there is more than one matrix."""
    moments = range(min(map(len, matrices)))
    heights = np.array([[metrics.average_accuracy(matrix, k) for k in moments] for matrix in matrices])
    tasks, mean = np.arange(1, heights.shape[1] + 1), heights.mean(axis=0)
    style = line_style(i)
    end = f"{mean[-1]:.1f} %"
    if len(matrices) > 1:
        std = heights.std(axis=0, ddof=1)
        end = f"{mean[-1]:.1f} ± {std[-1]:.1f} %"
        axes.fill_between(tasks, mean - std, mean + std, color=style["color"], alpha=0.2, linewidth=0)
    size = 6 if len(tasks) <= 10 else 5
    axes.plot(tasks, mean, label=legend_text(name, end), linewidth=2, markersize=size, **style)


def line_style(i: int) -> dict[str, Any]:
    """Return colour, marker and line style of line number i."""
    turn, k = divmod(i, len(LINE_COLOURS))
    linestyle = LINE_STYLES[turn % len(LINE_STYLES)]
    return {"color": LINE_COLOURS[k], "marker": LINE_MARKERS[k], "linestyle": linestyle}


def legend_text(name: str, end: str) -> str:
    """Wrap a legend entry; escape dollars (formulas) and leading underscores (hidden entries)."""
    text = "\n".join(textwrap.wrap(f"{name}: {end}", LEGEND_WIDTH)).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def tsne_before_after(
    plain_points: Floats,
    prompted_points: Floats,
    labels: Sequence[str],
    prototypes_before: Mapping[str, Floats],
    prototypes_after: Mapping[str, Floats],
) -> bytes:
    """Draw two t-SNE maps of the same N images, each with the prototypes [c, D] of every class.

    Embeddings [N, D] are `plain_points` without prompts, `prompted_points` under the prompt of each image's best match.
    """
    classes = list(dict.fromkeys([*prototypes_before, *labels]))
    columns = math.ceil(len(classes) / 10)
    figure = Figure(figsize=(11.2 + 0.9 * columns, 5.6), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_points(left, plain_points, labels, prototypes_before, classes)
    draw_points(right, prompted_points, labels, prototypes_after, classes)
    left.set_title("no prompt")
    right.set_title("CPP: under the prompt that made each image's best match")
    styles = [_class_style(i) for i in range(len(classes))]
    handles = [Line2D([], [], linestyle="", markersize=7, color=colour, marker=m) for colour, m in styles]
    star = Line2D([], [], linestyle="", marker="*", markersize=11, color="white", markeredgecolor="black")
    figure.legend(
        [*handles, star], [*classes, "prototype"], loc="outside right center", frameon=False, ncols=columns,
        title="class",
    )  # fmt: skip
    figure.suptitle("t-SNE of the test images' embeddings (cosine)", fontsize=12)
    return png(figure)


def draw_points(
    axes: Axes, points: Floats, labels: Sequence[str], prototypes: Mapping[str, Floats], classes: list[str]
) -> None:
    """Draw a t-SNE map of images [N, D] and of the prototypes [c, D] of each class, as stars."""
    owners = [name for name, group in prototypes.items() for _ in range(len(group))]
    flat = tsne_map(np.concatenate([points, *prototypes.values()]))
    images, stars = flat[: len(points)], flat[len(points) :]
    for i, name in enumerate(classes):
        members = images[[label == name for label in labels]]
        marks = stars[[owner == name for owner in owners]]
        colour, marker = _class_style(i)
        axes.scatter(members[:, 0], members[:, 1], s=13, color=colour, marker=marker, linewidths=0, alpha=0.75)
        axes.scatter(
            marks[:, 0], marks[:, 1], s=130, color=colour, marker="*", edgecolors="black", linewidths=0.9, zorder=3
        )  # fmt: skip
        if len(classes) <= len(CLASS_COLOURS) and len(members):  # classes must not differ by colour alone
            x, y = np.median(members, axis=0).tolist()
            halo = [withStroke(linewidth=3, foreground="white")]
            alignment: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
            axes.text(x, y, name, fontsize=15, weight="bold", path_effects=halo, **alignment)
    axes.set(xticks=[], yticks=[])


def tsne_map(points: Floats) -> Floats:
    """Project [N, D] to [N, 2], deterministically; rows are normalised, so that distances rank as cosines do."""
    unit = points / np.linalg.norm(points, axis=1, keepdims=True).clip(1e-12)
    perplexity = min(PERPLEXITY, (len(unit) - 1) / 3)
    flat: Floats = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)
    return flat


def _class_style(i: int) -> tuple[str, str]:
    """Return colour and marker of class number i."""
    turn, colour = divmod(i, len(CLASS_COLOURS))
    return CLASS_COLOURS[colour], CLASS_MARKERS[turn % len(CLASS_MARKERS)]


def class_similarity(names: Sequence[str], matrix: npt.ArrayLike, limit: int = 60) -> bytes:
    """Draw class similarities [C, C] as a heat map in which similar classes are adjacent.

    Of more than `limit` classes, those with the most similar neighbours are shown.
    """
    if not names:
        raise DataError("there are no classes to draw; learn some first", code="nothing-learned")
    similarities, title = np.asarray(matrix), "How alike classes are"
    indices = np.arange(len(names))
    if len(names) > limit:
        title += f"\n{limit:,} of {len(names):,} classes: those with the closest neighbours"
        nearest = np.array([np.delete(row, i).max() for i, row in enumerate(similarities)])
        indices = np.sort(np.argsort(-nearest, kind="stable")[:limit])
    order = indices[_similar_adjacent(similarities[np.ix_(indices, indices)])]
    cells = similarities[np.ix_(order, order)].astype(float)
    np.fill_diagonal(cells, np.nan)
    return png(_similarity_figure([names[i] for i in order], cells, title))


def confusion_matrix(names: Sequence[str], counts: npt.ArrayLike, limit: int = 60) -> bytes:
    """Draw how often images of each class (rows, actual) were predicted as each class (columns), as counts [C, C].

    Colours are shares of a row. Of more than `limit` classes, those with the most errors are shown.
    """
    cells, title = np.asarray(counts, dtype=float), "Actual and predicted classes"
    if len(names) > limit:
        title += f"\n{limit:,} of {len(names):,} classes: those with the most errors"
        indices = most_errors(cells, limit)
        names, cells = [names[i] for i in indices], cells[np.ix_(indices, indices)]
    shares = 100.0 * cells / np.maximum(cells.sum(axis=1, keepdims=True), 1.0)
    figure, axes, size = _map_figure(names, title)
    scale = Normalize(0.0, 100.0)
    for i, j in np.argwhere(cells > 0) if len(names) <= MAX_NUMBERED else ():
        ink = _ink(shares[i, j], scale)
        axes.text(j, i, f"{cells[i, j]:.0f}", ha="center", va="center", color=ink, fontsize=min(size, 9.0))
    image = axes.imshow(shares, cmap=HEAT, norm=scale)
    axes.set(xlabel="predicted", ylabel="actual")
    figure.colorbar(image, ax=axes, label="share of the class's images (%)", shrink=0.8)
    return png(figure)


def most_errors(counts: npt.ArrayLike, limit: int) -> npt.NDArray[np.intp]:
    """Return the indices of the `limit` classes with the most errors in a confusion matrix [C, C], in ascending order."""
    cells = np.asarray(counts)
    errors = cells.sum(axis=0) + cells.sum(axis=1) - 2 * np.diagonal(cells)
    return np.sort(np.argsort(-errors, kind="stable")[:limit])


def _similarity_figure(names: Sequence[str], cells: Floats, title: str) -> Figure:
    figure, axes, _ = _map_figure(names, title)
    image = heat_cells(axes, cells, _similarity_scale(cells), 2, 9 if len(names) <= MAX_NUMBERED else 0)
    axes.set_facecolor(DIAGONAL_COLOUR)
    figure.colorbar(image, ax=axes, label="greatest cosine between centroids", shrink=0.8)
    return figure


def _map_figure(names: Sequence[str], title: str) -> tuple[Figure, Axes, float]:
    """Return a figure whose rows and columns are classes, its axes, and the size of its letters."""
    side = min(MAX_MAP_SIDE, max(2.6, 0.45 * len(names)))
    size = min(10.0, 72.0 * side / len(names) / LINE_HEIGHT)
    labels = [short_name(name) for name in names]
    margin = LETTER_WIDTH * size / 72.0 * max(map(len, labels))
    figure = Figure(figsize=(side + margin + 1.6, side + margin + 0.8), dpi=DPI, layout="compressed")
    axes = figure.subplots()
    axes.set_xticks(range(len(names)), labels, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(names)), labels, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=11)
    return figure, axes, size


def _similar_adjacent(cells: Floats) -> list[int]:
    """Order classes by the leaves of a tree that joins the most similar ones first."""
    if len(cells) < 3:
        return list(range(len(cells)))
    distances = np.clip(1.0 - cells[np.triu_indices(len(cells), k=1)], 0.0, None)
    tree = linkage(distances, method="average", optimal_ordering=True)
    order: list[int] = leaves_list(tree).tolist()
    return order


def _similarity_scale(cells: Floats) -> Normalize:
    """Scale from the least to the greatest similarity of two classes, rounded to 0.05."""
    values = cells[~np.isnan(cells)]
    low, high = values.min(initial=1.0), values.max(initial=-1.0)
    if high - low < 0.05:  # hardly more than one value: use the whole range
        low, high = min(0.0, low), 1.0
    return Normalize(math.floor(20 * low) / 20, math.ceil(20 * high) / 20)


def short_name(name: str) -> str:
    """Shorten a name to one line, keeping both ends."""
    text = printable(name)
    half = (NAME_LETTERS - 1) // 2
    return text if len(text) <= NAME_LETTERS else f"{text[:half]}…{text[-half:]}"


def png(figure: Figure) -> bytes:
    """Render a figure; equal figures give equal bytes."""
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the plot shows boxes instead
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
