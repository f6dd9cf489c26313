"""The plot of what accuracy costs: its front is the true one, its labels can be read."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from protosteer.report.pareto import COSTS, front, pareto_figure, pareto_plot, points_of, spread_labels

FRAME = (0.0, 0.0, 640.0, 590.0)


def seeds(
    accuracy: float, spent: float, passes: float = 1.0, count: int = 3, **changes: Any
) -> list[dict[str, Any]]:
    return [
        {
            "last_accuracy": accuracy + i,
            "bytes_per_class": spent,
            "train_seconds": spent / 10,
            "passes_per_image": passes,
        }
        | changes
        for i in range(count)
    ]


def many(number: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows as they are met: most accuracies are alike, and most methods take one or two passes."""
    draw = np.random.default_rng(seed)
    return {
        f"method-{i:02} of {'x' * int(draw.integers(0, 9))}": seeds(
            float(draw.choice([draw.uniform(60, 76), draw.uniform(15, 76)])),
            float(10 ** draw.uniform(2, 7)),
            float(draw.choice([1.0, 1.0, 2.0, 3.8])),
        )
        for i in range(number)
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_that_of_brute_force(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points = [(float(c), float(a)) for c, a in draw.integers(0, 6, (12, 2))]  # many are equal in one or both
    unbeaten = {
        i
        for i, (cost, right) in enumerate(points)
        if not any(c <= cost and a >= right and (c, a) != (cost, right) for c, a in points)
    }
    found = front(points)
    assert set(found) == unbeaten and len(found) == len(unbeaten)
    assert [points[i] for i in found] == sorted(points[i] for i in found)


@pytest.mark.parametrize("seed", range(5))
def test_labels_of_thirty_points_stay_inside_and_apart(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points = draw.uniform(FRAME[:2], FRAME[2:], (30, 2))
    points[:12] = draw.normal((300, 300), 25, (12, 2))  # a crowd
    sizes = np.stack([draw.uniform(20, 130, 30), np.full(30, 12.0)], axis=1)
    middles = spread_labels(points, sizes, FRAME)
    low, high = middles - sizes / 2, middles + sizes / 2
    assert (low >= FRAME[:2]).all() and (high <= FRAME[2:]).all()
    for i, j in combinations(range(30), 2):
        assert (high[i] <= low[j]).any() or (high[j] <= low[i]).any(), (i, j)
    hidden = ((low[:, None] < points[None]) & (points[None] < high[:, None])).all(axis=2)
    assert not hidden.any()


@pytest.mark.parametrize("seed", range(2))
def test_labels_of_thirty_rows_in_the_picture(seed: int) -> None:
    figure = pareto_figure(many(30, seed))
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        assert len(boxes) == 30
        for box in boxes:
            assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and box.y1 <= axes.bbox.y1
        assert not [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)]


def test_a_row_that_lacks_a_figure_is_left_out_of_its_panel() -> None:
    rows = {"whole": seeds(70, 100), "no bytes": seeds(80, 200, bytes_per_class=None)}
    shown = [[text.get_text() for text in axes.texts] for axes in pareto_figure(rows).axes]
    assert shown == [["whole"], ["whole", "no bytes"], ["whole", "no bytes"]]
    (empty, *_) = pareto_figure({"no bytes": rows["no bytes"]}).axes
    assert [text.get_text() for text in empty.texts] == ["no run has this figure"]


def test_points_are_means_with_deviations() -> None:
    memory, training, passes = COSTS
    (point,) = points_of({"x": seeds(70, 100)}, memory)
    assert (point.cost, point.accuracy, point.cost_std, point.accuracy_std) == (100, 71, 0, 1)
    (point,) = points_of({"x": seeds(70, 0, count=1)}, training)
    assert (point.cost, point.accuracy_std) == (training.least, 0), (
        "nothing has a place on a logarithmic axis"
    )
    (point,) = points_of({"x": seeds(70, 0, passes=2.5, count=1)}, passes)
    assert point.cost == 2.5


def test_a_bar_that_reaches_nothing_does_not_stretch_the_axis() -> None:
    rows = {"unsteady": [*seeds(70, 0.001, count=1), *seeds(70, 200, count=1)], "steady": seeds(60, 1000)}
    low, high = pareto_figure(rows).axes[0].get_xlim()
    assert 10 < low < 100 and 1000 < high < 10_000


def test_the_picture_is_a_png_whatever_rows_are_called() -> None:
    rows = {"$x^2": seeds(70, 1), "_hidden\n": seeds(70, 1), "x" * 99: seeds(60, 10, count=1)}
    assert pareto_plot(rows)[:4] == b"\x89PNG" and pareto_plot(rows) == pareto_plot(rows)
    assert [text.get_text() for text in pareto_figure(rows).axes[0].texts[:2]] == ["$x^2", "_hidden?"]
