"""Plots: real PNGs of a readable size, that depend on their figures alone."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from protosteer.report import plots

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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_heat_maps_stand_side_by_side(count: int) -> None:
    one = picture(plots.accuracy_matrices({"a": FORGETS}))
    many = picture(plots.accuracy_matrices({str(i): FORGETS for i in range(count)}))
    height, width, _ = many.shape
    assert 300 < height < 1200
    assert width >= one.shape[1] + (count - 1) * 0.7 * one.shape[0]


def test_nothing_of_a_heat_map_is_cut_off() -> None:
    pixels = picture(plots.accuracy_matrices({"baseline": FORGETS, "cpp": KEEPS}))
    assert (pixels[:3] == 255).all() and (pixels[-3:] == 255).all()


def test_a_lower_accuracy_has_a_darker_cell() -> None:
    pixels = picture(plots.accuracy_matrices({"good": KEEPS, "bad": FORGETS}))
    yellow = (pixels[..., 0] > 230) & (pixels[..., 1] > 200) & (pixels[..., 2] < 120)
    third = pixels.shape[1] // 3  # the colour bar is in the last one
    assert yellow[:, :third].sum() > 2 * yellow[:, third : 2 * third].sum()


def test_curves_are_drawn_for_every_run() -> None:
    both = picture(plots.accuracy_curves({"baseline": FORGETS, "cpp": KEEPS}))
    colours = {tuple(c) for c in both.reshape(-1, 3)}
    assert {(0, 0, 0), (0x56, 0xB4, 0xE9)} <= colours
    assert both.shape[1] > both.shape[0] > 300


def colour_count(pixels: np.ndarray, colour: str) -> int:
    wanted = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return int((pixels == wanted).all(axis=-1).sum())


def shade(colour: str) -> str:
    """A band's colour on white: 20 % of the line's."""
    parts = [round(255 - 0.2 * (255 - int(colour[k : k + 2], 16))) for k in (1, 3, 5)]
    return "#{:02X}{:02X}{:02X}".format(*parts)


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


def test_only_several_seeds_have_a_band_that_can_be_seen() -> None:
    wide = [[[90.0], [70.0, 70.0]], [[80.0], [60.0, 60.0]]]
    banded = picture(plots.accuracy_bands({"cpp": wide}))
    single = picture(plots.accuracy_bands({"cpp": wide[:1]}))
    assert colour_count(banded, shade(plots.LINE_COLOURS[0])) > 10_000
    assert colour_count(single, shade(plots.LINE_COLOURS[0])) < 500


def test_curves_are_bands_of_single_seeds() -> None:
    assert plots.accuracy_curves({"a": KEEPS}) == plots.accuracy_bands({"a": [KEEPS]})


def test_eight_rows_of_unequal_length_are_all_seen() -> None:
    rows = {f"row {k}": [level(90.0 - 8 * k, 20 - k)] for k in range(8)}
    pixels = picture(plots.accuracy_bands(rows))
    assert all(colour_count(pixels, colour) > 300 for colour in plots.LINE_COLOURS)
    assert pixels.shape[1] < 1300 and (pixels[:3] == 255).all() and (pixels[:, -3:] == 255).all()


def level(height: float, tasks: int) -> list[list[float]]:
    return [[height] * (i + 1) for i in range(tasks)]


def test_labels_are_not_formulas_and_never_left_out() -> None:
    assert plots._legend_text("a$x$", "1 %") == r"a\$x\$: 1 %"
    assert not plots._legend_text("_private", "1 %").startswith("_")
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
    assert len(plots._task_numbers(100)) <= plots.MOST_TICKS
    assert list(plots._task_numbers(1)) == [1]


def test_tsne_separates_what_is_apart() -> None:
    points, labels, _ = clusters()
    flat = plots.tsne_map(points)
    assert flat.shape == (60, 2)
    groups = [flat[[label == name for label in labels]] for name in "abc"]
    centres = np.stack([group.mean(axis=0) for group in groups])
    widest = max(np.linalg.norm(group - group.mean(axis=0), axis=1).mean() for group in groups)
    nearest = min(np.linalg.norm(centres[i] - centres[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert nearest > 2 * widest


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
    classes = [str(i) for i in range(12)]
    assert len({plots._look(classes, name) for name in classes}) == 12


@pytest.mark.slow
def test_pyplot_is_not_touched() -> None:
    code = "import protosteer.report.plots as p, sys; p.accuracy_curves({'a': [[1.0]]}); print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
