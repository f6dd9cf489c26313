"""The plot of what accuracy costs: its front is the true one, its legend names every row."""

from typing import Any

import numpy as np
import pytest

from protosteer.report.pareto import COSTS, front, pareto_figure, pareto_plot, points_of


def seeds(accuracy: float, spent: float, passes: float = 1.0, count: int = 3, **changes: Any) -> list[dict[str, Any]]:
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


def test_a_row_that_lacks_a_figure_is_left_out_of_its_panel() -> None:
    rows = {"whole": seeds(70, 100), "no bytes": seeds(80, 200, bytes_per_class=None)}
    figure = pareto_figure(rows)
    shown = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert shown == [["2"], ["1", "2"], ["1", "2"]]
    assert figure.texts[-1].get_text().split() == ["1", "no", "bytes", "2", "whole"]
    (empty, *_) = pareto_figure({"no bytes": rows["no bytes"]}).axes
    assert [text.get_text() for text in empty.texts] == ["no run has this metric"]


def test_points_are_means_with_deviations() -> None:
    memory, training, passes = COSTS
    (point,) = points_of({"x": seeds(70, 100)}, memory)
    assert (point.cost, point.accuracy, point.cost_std, point.accuracy_std) == (100, 71, 0, 1)
    (point,) = points_of({"x": seeds(70, 0, count=1)}, training)
    assert (point.cost, point.accuracy_std) == (training.floor, 0), "nothing has a place on a logarithmic axis"
    (point,) = points_of({"x": seeds(70, 0, passes=2.5, count=1)}, passes)
    assert point.cost == 2.5


def test_a_bar_that_reaches_nothing_does_not_stretch_the_axis() -> None:
    rows = {"unsteady": [*seeds(70, 0.001, count=1), *seeds(70, 200, count=1)], "steady": seeds(60, 1000)}
    low, high = pareto_figure(rows).axes[0].get_xlim()
    assert 10 < low < 100 and 1000 < high < 10_000


def test_the_picture_is_a_png_whatever_rows_are_called() -> None:
    rows = {"$x^2": seeds(70, 1), "_hidden\n": seeds(70, 1), "x" * 99: seeds(60, 10, count=1)}
    assert pareto_plot(rows)[:4] == b"\x89PNG" and pareto_plot(rows) == pareto_plot(rows)
    legend = pareto_figure(rows).texts[-1].get_text().splitlines()
    assert legend[:2] == ["  1  $x^2", "  2  _hidden?"]
