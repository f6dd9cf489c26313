"""Intervals of accuracies."""

import pytest
from scipy.stats import binomtest

from protosteer.util.statistics import Accuracy


@pytest.mark.parametrize(("right", "images"), [(0, 1), (1, 1), (9, 12), (100, 120), (0, 50), (50, 50), (7, 10_000)])
def test_the_interval_is_wilsons(right: int, images: int) -> None:
    exact = binomtest(right, images).proportion_ci(method="wilson")
    assert Accuracy(right, images).interval == pytest.approx((100 * exact.low, 100 * exact.high), abs=1e-4)


def test_no_percentage_stands_alone() -> None:
    assert str(Accuracy(100, 120)) == "83 % (76 to 89)" and str(Accuracy(9, 12)) == "9 of 12 (47 to 91 %)"
    assert Accuracy(0, 0).interval == (0.0, 100.0)
