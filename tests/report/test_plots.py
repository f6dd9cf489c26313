"""Plots: whole PNGs of a readable size that depend on their numbers alone."""

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
from protosteer.evaluation import metrics
from protosteer.report import plots
from protosteer.report.reliability import reliability_plot
from protosteer.util import statistics

pytestmark = pytest.mark.slow

FORGETS = [[100.0], [60.0, 90.0], [50.0, 40.0, 80.0]]
KEEPS = [[100.0], [99.0, 98.0], [98.5, 97.0, 96.0]]


def whole_picture(png: bytes) -> np.ndarray:
    """Decode a PNG at whose edges nothing is cut off."""
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    pixels = np.asarray(image.convert("RGB"))
    edges = (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])
    assert all((edge == 255).all() for edge in edges), "something is cut off"
    return pixels


def colour_count(pixels: np.ndarray, colour: str) -> int:
    wanted = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return int((pixels == wanted).all(axis=-1).sum())


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Every text drawn into axes, with its font size."""
    drawn: list[tuple[str, float]] = []
    draw = Axes.text
    monkeypatch.setattr(
        Axes, "text", lambda self, *a, **k: (drawn.append((a[2], k["fontsize"])), draw(self, *a, **k))[1]
    )
    return drawn


def level(height: float, tasks: int) -> list[list[float]]:
    return [[height] * (i + 1) for i in range(tasks)]


def test_heat_maps_stand_side_by_side_and_lower_accuracies_are_darker() -> None:
    one = whole_picture(plots.accuracy_matrices({"good": KEEPS}))
    two = whole_picture(plots.accuracy_matrices({"good": KEEPS, "bad": FORGETS}))
    assert 300 < two.shape[0] < 1200 and two.shape[1] >= one.shape[1] + 0.7 * one.shape[0]
    yellow = (two[..., 0] > 230) & (two[..., 1] > 200) & (two[..., 2] < 120)
    third = two.shape[1] // 3  # the colour bar is in the last one
    assert yellow[:, :third].sum() > 2 * yellow[:, third : 2 * third].sum()


def test_twenty_tasks_have_numbers_and_fifty_have_none(texts: list[tuple[str, float]]) -> None:
    plots.accuracy_matrices({"a": level(100.0, 20)})
    assert len(texts) == 210 and min(size for _, size in texts) >= 7
    texts.clear()
    plots.accuracy_matrices({"a": level(100.0, 50)})
    assert not texts
    assert list(plots._task_numbers(20)) == list(range(1, 21)) and list(plots._task_numbers(1)) == [1]
    assert len(plots._task_numbers(100)) <= plots.MAX_TICKS


def test_a_band_is_one_sample_deviation_to_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = Axes.fill_between
    monkeypatch.setattr(Axes, "fill_between", lambda self, *a, **k: (drawn.append(a), draw(self, *a, **k))[1])
    seeds = [[[90.0], [80.0, 70.0]], [[92.0], [84.0, 78.0]]]  # means after task 2: 75 and 81
    plots.accuracy_bands({"cpp": seeds, "one seed": [seeds[0]]})
    ((tasks, low, high),) = drawn
    root = 2**0.5
    assert tasks.tolist() == [1, 2]
    assert low == pytest.approx([91 - root, 78 - 3 * root])
    assert high == pytest.approx([91 + root, 78 + 3 * root])
    assert plots.accuracy_curves({"a": KEEPS}) == plots.accuracy_bands({"a": [KEEPS]})


def test_eight_rows_of_unequal_length_are_all_visible() -> None:
    rows = {f"row {k}": [level(90.0 - 8 * k, 20 - k)] for k in range(8)}
    pixels = whole_picture(plots.accuracy_bands(rows))
    assert all(colour_count(pixels, colour) > 300 for colour in plots.LINE_COLOURS)
    assert pixels.shape[1] < 1300


def test_labels_are_not_formulas_and_never_skipped() -> None:
    assert plots.legend_text("a$x$", "1 %") == r"a\$x\$: 1 %"
    assert not plots.legend_text("_private", "1 %").startswith("_")
    plots.accuracy_bands({"$broken_{": [KEEPS]})
    plots.accuracy_matrices({"$broken_{": KEEPS})


def clusters(seed: int = 0) -> tuple[np.ndarray, list[str], dict[str, np.ndarray]]:
    """Three far-apart groups of embeddings, and two prototypes in each."""
    generator = np.random.default_rng(seed)
    centres = dict(zip("abc", 9 * np.eye(3, 8), strict=True))
    points = np.concatenate([c + generator.normal(size=(20, 8)) for c in centres.values()])
    labels = [name for name in centres for _ in range(20)]
    return points, labels, {name: centre + generator.normal(size=(2, 8)) for name, centre in centres.items()}


def test_tsne_compares_directions_is_deterministic_and_shows_every_class() -> None:
    points, labels, prototypes = clusters()
    stretched = points * np.linspace(1, 4, len(points))[:, None]
    assert np.allclose(plots.tsne_map(points), plots.tsne_map(stretched), atol=1.0)
    after = clusters(seed=1)[0]
    png = plots.tsne_before_after(points, after, labels, prototypes, prototypes)
    assert png == plots.tsne_before_after(points, after, labels, prototypes, prototypes)
    pixels = whole_picture(png)
    assert all(colour_count(pixels, colour) for colour in plots.CLASS_COLOURS[:3])
    assert len({plots._class_style(i) for i in range(12)}) == 12


def groups(count: int, seed: int = 0) -> np.ndarray:
    """Similarities of `count` classes in two groups: every second class belongs to the other one."""
    odd = np.arange(count) % 2
    noise = np.random.default_rng(seed).uniform(-0.05, 0.05, (count, count))
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
    [["a"], ["a", "b"], [f"{i} of the long names WWWWWWWW" for i in range(21)],
     ["$broken_{", "two\nlines", "\x1b[31m", "_hidden", "", "熊", "\udcff"]],
    ids=["one", "two", "long", "odd"],
)  # fmt: skip
def test_a_map_of_classes_is_a_whole_picture(names: list[str], recwarn: pytest.WarningsRecorder) -> None:
    matrix = torch.tensor(groups(len(names)), dtype=torch.float32)
    before = matrix.clone()
    png = plots.class_similarity(names, matrix)
    assert png == plots.class_similarity(names, matrix) and torch.equal(matrix, before)
    pixels = whole_picture(png)
    height, width, _ = pixels.shape
    assert 300 < height < 1600 and 300 < width < 1800
    assert len(names) > 2 or colour_count(pixels, plots.DIAGONAL_COLOUR) > 0.1 * height * width
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_similar_classes_are_adjacent(maps: list[tuple]) -> None:
    matrix = groups(9)
    plots.class_similarity([str(i) for i in range(9)], matrix)
    ((names, cells, _),) = maps
    order = [int(name) for name in names]
    assert sorted(order) == list(range(9))
    assert sum(a % 2 != b % 2 for a, b in zip(order, order[1:], strict=False)) == 1
    assert np.isnan(np.diagonal(cells)).all()
    off = ~np.eye(9, dtype=bool)
    assert np.array_equal(cells[off], matrix[np.ix_(order, order)][off])


def test_of_many_classes_those_with_the_most_similar_neighbours_are_shown(maps: list[tuple]) -> None:
    half = np.triu(np.random.default_rng(3).uniform(0, 0.9, (30, 30)), k=1)
    matrix = half + half.T + np.eye(30)
    plots.class_similarity([str(i) for i in range(30)], matrix, limit=7)
    ((names, cells, title),) = maps
    nearest = [max(matrix[i][j] for j in range(30) if j != i) for i in range(30)]
    assert {int(name) for name in names} == set(sorted(range(30), key=lambda i: -nearest[i])[:7])
    assert cells.shape == (7, 7) and "7 of 30 classes" in title
    plots.class_similarity([str(i) for i in range(30)], matrix, limit=30)
    assert "of 30" not in maps[-1][2]
    with expect_error("nothing-learned", DataError):
        plots.class_similarity([], np.zeros((0, 0)))


@pytest.mark.parametrize(
    ("values", "limits"), [([0.62, 0.43, 0.51], (0.40, 0.65)), ([-0.31], (-0.35, 1.0)), ([], (0.0, 1.0))]
)
def test_the_colours_of_a_map_run_from_the_least_to_the_greatest_similarity(
    values: list[float], limits: tuple[float, float]
) -> None:
    scale = plots._similarity_scale(np.array([np.nan, *values]))
    assert (scale.vmin, scale.vmax) == pytest.approx(limits)


def test_few_classes_have_numbers_and_many_have_none(texts: list[tuple[str, float]]) -> None:
    matrix = np.array([[1.0, -0.001, 0.5], [-0.001, 1.0, 0.25], [0.5, 0.25, 1.0]])
    plots.class_similarity(["a", "b", "c"], matrix)
    assert sorted(text for text, _ in texts) == ["0.00", "0.00", "0.25", "0.25", "0.50", "0.50"]
    texts.clear()
    plots.class_similarity([str(i) for i in range(plots.MAX_NUMBERED + 1)], groups(plots.MAX_NUMBERED + 1))
    assert not texts


def test_long_names_keep_both_ends() -> None:
    assert plots.short_name("two\nlines") == "two?lines"
    long = plots.short_name("begin " + 50 * "x" + " end")
    assert len(long) == plots.NAME_LETTERS and long.startswith("begin") and long.endswith("end")


def test_pyplot_is_not_imported() -> None:
    code = "import protosteer.report.plots as p, sys; p.accuracy_curves({'a': [[1.0]]}); print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def bins(seed: int) -> statistics.Bins:
    draw = torch.Generator().manual_seed(seed)
    confidence = torch.rand(300, generator=draw) ** 0.5
    return statistics.reliability(confidence, torch.rand(300, generator=draw) < confidence)


def test_a_reliability_diagram_has_the_points_and_shares_of_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[tuple[float, float]] = []
    shares: list[np.ndarray] = []
    scatter, stairs = Axes.scatter, Axes.stairs

    def record_scatter(self: Axes, x: np.ndarray, y: np.ndarray, **more: object) -> object:
        points.extend(zip(x.tolist(), y.tolist(), strict=True))
        return scatter(self, x, y, **more)

    monkeypatch.setattr(Axes, "scatter", record_scatter)
    monkeypatch.setattr(Axes, "stairs", lambda self, h, *a, **k: (shares.append(h), stairs(self, h, *a, **k))[1])
    seeds = [bins(0), bins(1)]
    pixels = whole_picture(reliability_plot({"a [$name$]": seeds}))
    expected = [(b["confidence"], b["accuracy"]) for b in metrics.pooled(seeds) if b["images"]]
    assert np.array(sorted(points)) == pytest.approx(np.array(sorted(expected)))
    assert shares[0].tolist() == pytest.approx([b["images"] / 6 for b in metrics.pooled(seeds)])
    assert 500 < pixels.shape[0] < 1000 and 500 < pixels.shape[1] < 1000
    assert reliability_plot({"a": [bins(0)]}) == reliability_plot({"a": [bins(0)]})


def test_long_names_make_a_taller_picture_not_a_smaller_plot() -> None:
    def height(name: str) -> int:
        return whole_picture(reliability_plot({f"{name} {i}": [bins(i)] for i in range(4)})).shape[0]

    assert height("a name of many words " * 10) > height("a") + 200
