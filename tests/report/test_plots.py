"""Plots: real PNGs of a readable size, that depend on their figures alone."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image

from expect import expect_error
from protosteer.errors import DataError
from protosteer.report import plots

pytestmark = pytest.mark.slow

FORGETS = [[100.0], [60.0, 90.0], [50.0, 40.0, 80.0]]
KEEPS = [[100.0], [99.0, 98.0], [98.5, 97.0, 96.0]]


def picture(png: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB"))


def clusters(seed: int = 0) -> tuple[np.ndarray, list[str], dict[str, np.ndarray]]:
    """Three far-apart groups of embeddings, and two prototypes in each."""
    generator = np.random.default_rng(seed)
    centres = dict(zip("abc", 9 * np.eye(3, 8), strict=True))
    points = np.concatenate([c + generator.normal(size=(20, 8)) for c in centres.values()])
    labels = [name for name in centres for _ in range(20)]
    return points, labels, {name: centre + generator.normal(size=(2, 8)) for name, centre in centres.items()}


def frame_is_white(pixels: np.ndarray) -> bool:
    """Nothing is cut off at the edges."""
    return all((edge == 255).all() for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_heat_maps_stand_side_by_side(count: int) -> None:
    one = picture(plots.accuracy_matrices({"a": FORGETS}))
    many = picture(plots.accuracy_matrices({str(i): FORGETS for i in range(count)}))
    height, width, _ = many.shape
    assert 300 < height < 1200 and frame_is_white(many)
    assert width >= one.shape[1] + (count - 1) * 0.7 * one.shape[0]


def test_a_lower_accuracy_has_a_darker_cell() -> None:
    pixels = picture(plots.accuracy_matrices({"good": KEEPS, "bad": FORGETS}))
    yellow = (pixels[..., 0] > 230) & (pixels[..., 1] > 200) & (pixels[..., 2] < 120)
    third = pixels.shape[1] // 3  # the colour bar is in the last one
    assert yellow[:, :third].sum() > 2 * yellow[:, third : 2 * third].sum()


def colour_count(pixels: np.ndarray, colour: str) -> int:
    wanted = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return int((pixels == wanted).all(axis=-1).sum())


def test_a_band_is_one_sample_deviation_to_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = Axes.fill_between
    monkeypatch.setattr(Axes, "fill_between", lambda self, *a, **k: (drawn.append(a), draw(self, *a, **k))[1])
    seeds = [[[90.0], [80.0, 70.0]], [[92.0], [84.0, 78.0]]]  # means after task 2: 75 and 81
    plots.accuracy_bands({"cpp": seeds, "one seed": [seeds[0]]})
    ((tasks, low, high),) = drawn
    assert tasks.tolist() == [1, 2]
    root = 2**0.5
    assert low == pytest.approx([91 - root, 78 - 3 * root])
    assert high == pytest.approx([91 + root, 78 + 3 * root])


def test_curves_are_bands_of_single_seeds() -> None:
    assert plots.accuracy_curves({"a": KEEPS}) == plots.accuracy_bands({"a": [KEEPS]})


def test_eight_rows_of_unequal_length_are_all_seen() -> None:
    rows = {f"row {k}": [level(90.0 - 8 * k, 20 - k)] for k in range(8)}
    pixels = picture(plots.accuracy_bands(rows))
    assert all(colour_count(pixels, colour) > 300 for colour in plots.LINE_COLOURS)
    assert pixels.shape[1] < 1300 and frame_is_white(pixels)


def level(height: float, tasks: int) -> list[list[float]]:
    return [[height] * (i + 1) for i in range(tasks)]


def test_labels_are_not_formulas_and_never_left_out() -> None:
    assert plots.legend_text("a$x$", "1 %") == r"a\$x\$: 1 %"
    assert not plots.legend_text("_private", "1 %").startswith("_")
    plots.accuracy_bands({"$broken_{": [KEEPS]})
    plots.accuracy_matrices({"$broken_{": KEEPS})


def test_twenty_tasks_have_numbers_and_fifty_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[float] = []
    draw = Axes.text
    monkeypatch.setattr(
        Axes, "text", lambda self, *a, **k: (sizes.append(k["fontsize"]), draw(self, *a, **k))[1]
    )
    plots.accuracy_matrices({"a": level(100.0, 20)})
    assert len(sizes) == 210 and min(sizes) >= 7
    sizes.clear()
    plots.accuracy_matrices({"a": level(100.0, 50)})
    assert not sizes


def test_axes_name_tasks_without_crowding() -> None:
    assert list(plots._task_numbers(20)) == list(range(1, 21))
    assert len(plots._task_numbers(100)) <= plots.MAX_TICKS
    assert list(plots._task_numbers(1)) == [1]


def test_tsne_compares_directions_not_lengths() -> None:
    points, _, _ = clusters()
    stretched = points * np.linspace(1, 4, len(points))[:, None]
    assert np.allclose(plots.tsne_map(points), plots.tsne_map(stretched), atol=1.0)


@pytest.mark.slow
def test_tsne_picture_is_the_same_every_time_and_has_every_class() -> None:
    points, labels, prototypes = clusters()
    after = clusters(seed=1)[0]
    png = plots.tsne_before_after(points, after, labels, prototypes, prototypes)
    assert png == plots.tsne_before_after(points, after, labels, prototypes, prototypes)
    colours = {"#{:02X}{:02X}{:02X}".format(*c) for c in picture(png).reshape(-1, 3)}
    assert set(plots.CLASS_COLOURS[:3]) <= colours


def test_twelve_classes_look_different() -> None:
    assert len({plots._class_style(i) for i in range(12)}) == 12


def groups(count: int, seed: int = 0) -> np.ndarray:
    """Similarities of `count` classes in two groups: every second class belongs to the other one."""
    generator = np.random.default_rng(seed)
    odd = np.arange(count) % 2
    noise = generator.uniform(-0.05, 0.05, (count, count))
    matrix = np.where(odd[:, None] == odd, 0.8, 0.2) + (noise + noise.T) / 2
    np.fill_diagonal(matrix, 1.0)
    return matrix


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What is drawn as maps of class similarity: names, cells, title."""
    drawn: list[tuple] = []
    monkeypatch.setattr(plots, "_similarity_figure", lambda *a: drawn.append(a))
    monkeypatch.setattr(plots, "png", lambda figure: b"")
    return drawn


@pytest.mark.parametrize(
    "names",
    [["a"], ["a", "b"], list("abcdefghij"), [f"{i} of the long names WWWWWWWW" for i in range(21)]],
    ids=len,
)
def test_a_map_of_classes_is_a_whole_picture(names: list[str]) -> None:
    pixels = picture(plots.class_similarity(names, groups(len(names))))
    height, width, _ = pixels.shape
    assert 300 < height < 1600 and 300 < width < 1800 and frame_is_white(pixels)


def test_classes_that_are_alike_stand_together(maps: list[tuple]) -> None:
    matrix = groups(9)
    plots.class_similarity([str(i) for i in range(9)], matrix)
    ((names, cells, _),) = maps
    order = [int(name) for name in names]
    assert sorted(order) == list(range(9))
    assert sum(a % 2 != b % 2 for a, b in zip(order, order[1:], strict=False)) == 1
    assert np.isnan(np.diagonal(cells)).all()
    off = ~np.eye(9, dtype=bool)
    assert np.array_equal(cells[off], matrix[np.ix_(order, order)][off])


def test_of_many_classes_those_with_the_closest_neighbours_are_shown(maps: list[tuple]) -> None:
    generator = np.random.default_rng(3)
    half = np.triu(generator.uniform(0, 0.9, (30, 30)), k=1)
    matrix = half + half.T + np.eye(30)
    plots.class_similarity([str(i) for i in range(30)], matrix, most=7)
    ((names, cells, title),) = maps
    nearest = [max(matrix[i][j] for j in range(30) if j != i) for i in range(30)]
    assert {int(name) for name in names} == set(sorted(range(30), key=lambda i: -nearest[i])[:7])
    assert cells.shape == (7, 7) and "7 of 30 classes" in title
    plots.class_similarity([str(i) for i in range(30)], matrix, most=30)
    assert "of 30" not in maps[-1][2]


def test_the_colours_of_a_map_run_from_the_least_to_the_greatest_similarity() -> None:
    cells = np.array([[np.nan, 0.62, 0.43], [0.62, np.nan, 0.51], [0.43, 0.51, np.nan]])
    scale = plots._similarity_scale(cells)
    assert (scale.vmin, scale.vmax) == pytest.approx((0.40, 0.65))
    one = plots._similarity_scale(np.array([[np.nan, -0.31], [-0.31, np.nan]]))
    assert (one.vmin, one.vmax) == pytest.approx((-0.35, 1.0))
    none = plots._similarity_scale(np.array([[np.nan]]))
    assert (none.vmin, none.vmax) == (0.0, 1.0)


def test_the_diagonal_is_not_coloured() -> None:
    pixels = picture(plots.class_similarity(["a", "b"], groups(2)))
    assert colour_count(pixels, plots.DIAGONAL_COLOUR) > 0.1 * pixels.shape[0] * pixels.shape[1]


def test_few_classes_have_numbers_and_many_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    draw = Axes.text
    monkeypatch.setattr(Axes, "text", lambda self, *a, **k: (written.append(a[2]), draw(self, *a, **k))[1])
    monkeypatch.setattr(plots, "png", lambda figure: b"")
    matrix = np.array([[1.0, -0.001, 0.5], [-0.001, 1.0, 0.25], [0.5, 0.25, 1.0]])
    plots.class_similarity(["a", "b", "c"], matrix)
    assert sorted(written) == ["0.00", "0.00", "0.25", "0.25", "0.50", "0.50"]
    written.clear()
    plots.class_similarity([str(i) for i in range(plots.MAX_NUMBERED + 1)], groups(plots.MAX_NUMBERED + 1))
    assert not written


def test_names_of_classes_may_be_odd(recwarn: pytest.WarningsRecorder) -> None:
    odd = ["$broken_{", "two\nlines", "\x1b[31m", "_hidden", "", "熊", "\udcff"]
    assert picture(plots.class_similarity(odd, groups(len(odd)))).size
    assert not [w for w in recwarn if "Glyph" in str(w.message)]
    assert plots.short_name("two\nlines") == "two?lines"
    long = plots.short_name("begin " + 50 * "x" + " end")
    assert len(long) == plots.NAME_LETTERS and long.startswith("begin") and long.endswith("end")


def test_a_map_takes_a_tensor_leaves_it_alone_and_is_the_same_every_time() -> None:
    matrix = torch.tensor(groups(6), dtype=torch.float32)
    before = matrix.clone()
    names = list("abcdef")
    assert plots.class_similarity(names, matrix) == plots.class_similarity(names, matrix)
    assert torch.equal(matrix, before)


def test_no_class_no_map() -> None:
    with expect_error("nothing-learned", DataError):
        plots.class_similarity([], np.zeros((0, 0)))


@pytest.mark.slow
def test_pyplot_is_not_touched() -> None:
    code = "import protosteer.report.plots as p, sys; p.accuracy_curves({'a': [[1.0]]}); print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
