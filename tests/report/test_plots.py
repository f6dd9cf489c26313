"""Plots: real PNGs of a readable size, that depend on their figures alone; tables: the figures as text."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from protosteer.report import plots, tables

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


def test_pyplot_is_not_touched() -> None:
    code = "import protosteer.report.plots as p, sys; p.accuracy_curves({'a': [[1.0]]}); print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def text(table: object) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(table)
    return file.getvalue()


def test_a_table_has_a_line_per_run() -> None:
    row = {"last_accuracy": 95.254, "avg_accuracy": 97.0, "last_forgetting": -0.5, "prompts_per_image": 1.234,
           "bytes_per_class": 13096.0}  # fmt: skip
    lines = text(tables.figures_table({"baseline": row, "cpp": row})).splitlines()
    assert (
        sum("95.25 %" in line and "-0.50" in line and "1.23" in line and "13,096" in line for line in lines)
        == 2
    )
    assert any(line.split()[:1] == ["cpp"] for line in lines)


def test_a_matrix_has_a_line_per_moment() -> None:
    lines = [line.split() for line in text(tables.matrix_table(FORGETS, "baseline")).splitlines()]
    assert ["after", "task", "3", "50.0", "40.0", "80.0"] in lines
    assert ["after", "task", "1", "100.0"] in lines
