"""Intervals and tests against scipy, closed forms and enumeration."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from expect import expect_error
from protosteer.errors import RunError
from protosteer.evaluation.predictions import Predictions
from protosteer.evaluation.significance import bootstrap, compare_with_first, holm, mcnemar, paired_tests

DRAW = np.random.default_rng(3)


def hits(share: float, images: int = 200) -> Any:
    return np.random.default_rng(int(1000 * share)).random(images) < share


def test_the_interval_of_one_run_is_the_binomial_one() -> None:
    right = hits(0.7)
    low, high = bootstrap(right.astype(float))
    exact = stats.binom.ppf([0.025, 0.975], len(right), right.mean()) / len(right)
    assert (low, high) == pytest.approx(tuple(exact), abs=0.006)


def test_the_interval_of_several_runs_is_scipy_s() -> None:
    means = np.mean([hits(share) for share in (0.5, 0.7, 0.9)], axis=0)
    expected = stats.bootstrap((means,), np.mean, n_resamples=5000, method="percentile", rng=DRAW).confidence_interval
    assert bootstrap(means) == pytest.approx((expected.low, expected.high), abs=0.006)
    gaps = hits(0.5).astype(float) - hits(0.7)
    expected = stats.bootstrap((gaps,), np.mean, n_resamples=5000, method="percentile", rng=DRAW).confidence_interval
    assert bootstrap(gaps) == pytest.approx((expected.low, expected.high), abs=0.01)


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (3, 3), (0, 5), (1, 8), (9, 2), (7, 6)])
def test_mcnemar_counts_all_ways_to_be_as_uneven(only_first: int, only_second: int) -> None:
    first = np.array([1] * only_first + [0] * only_second + [1, 0], dtype=bool)
    second = np.array([0] * only_first + [1] * only_second + [1, 0], dtype=bool)
    n, gap = only_first + only_second, abs(only_first - only_second)
    as_uneven = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= gap)
    assert mcnemar(first, second) == pytest.approx(as_uneven / 2**n)


def test_paired_tests_are_those_of_scipy_and_of_all_signs() -> None:
    gaps = np.array([0.4, 1.3, -0.2, 0.9, 2.1])
    found = paired_tests(gaps)
    t = gaps.mean() / (gaps.std(ddof=1) / math.sqrt(5))
    assert found["t_p"] == pytest.approx(2 * stats.t.sf(t, 4))
    ranks = stats.rankdata(abs(gaps))
    observed = abs(ranks @ np.sign(gaps))
    signs = [abs(ranks @ np.array(s)) >= observed for s in product((-1, 1), repeat=5)]
    assert found["wilcoxon_p"] == pytest.approx(np.mean(signs))
    assert paired_tests(np.zeros(3)) == {"t_p": 1.0, "wilcoxon_p": 1.0}
    assert paired_tests(np.ones(3))["t_p"] is None


def test_holm_rejects_what_the_step_down_procedure_rejects() -> None:
    p = [0.04, 0.001, 0.03, 0.012]
    corrected = holm(p)
    for level in (0.01, 0.02, 0.05, 0.1, 0.2):
        rejected = set()
        for i, k in enumerate(sorted(range(4), key=p.__getitem__)):
            if p[k] > level / (4 - i):
                break
            rejected.add(k)
        assert rejected == {k for k in range(4) if corrected[k] <= level}
    assert holm([]) == []


def run(folder: Path, seed: int, right: Any, order: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    """A run whose images 0, 2, 4, ... are of class a, the others of b; tasks have a class each, in this order."""
    folder.mkdir(parents=True)
    labels, classes = np.arange(len(right)) % 2, np.array(order)
    rows = np.concatenate([np.flatnonzero(labels == "ab".index(name)) for name in order])
    actual = np.array([order.index("ab"[k]) for k in labels[rows]], dtype=np.int32)
    predicted = np.where(right[rows], actual, 1 - actual).astype(np.int32)
    Predictions(classes, actual, actual, predicted).save(folder / "predictions-02.npz")
    return {"seed": seed, "folder": str(folder), "test_images": "a"}


def test_rows_are_paired_by_class_order_and_seed_and_aligned_by_image(tmp_path: Path) -> None:
    base, better = [hits(0.6), hits(0.61)], [hits(0.8), hits(0.81)]
    orders = [("a", "b"), ("b", "a")]
    rows = {
        "base": [run(tmp_path / f"x{i}", 0, base[i], orders[i]) for i in (0, 1)],
        "better": [run(tmp_path / f"y{i}", 0, better[i], orders[i]) for i in (0, 1)],
        "other": [run(tmp_path / "z", 7, better[0])],
    }
    found = compare_with_first(rows)
    assert found["base"]["accuracy"] == pytest.approx(100 * np.mean(base)) and "pairs" not in found["base"]
    one = found["better"]
    assert one["pairs"] == 2 and one["difference"] == pytest.approx(100 * (np.mean(better) - np.mean(base)))
    assert one["difference_low"] < one["difference"] < one["difference_high"]
    assert one["mcnemar_p"] == pytest.approx(max(mcnemar(better[i], base[i]) for i in (0, 1)))
    assert one["mcnemar_holm_p"] == one["mcnemar_p"], "one comparison needs no correction"
    means = np.mean(better, axis=1) - np.mean(base, axis=1)
    assert one["t_p"] == pytest.approx(stats.ttest_1samp(means, 0).pvalue)
    # An image is the same in both class orders: its mean over runs decides, not its place in a file.
    image_means = np.mean(np.array(better, dtype=float), axis=0)
    low, high = bootstrap(image_means)
    assert (one["accuracy_low"], one["accuracy_high"]) == pytest.approx((100 * low, 100 * high))
    assert found["other"]["pairs"] == 0 and "difference" not in found["other"]
    rows["better"][0]["test_images"] = rows["better"][1]["test_images"] = "b"
    assert compare_with_first(rows)["better"]["pairs"] == 0, "other images of the same classes"


def test_a_pair_that_other_seeds_repeat_counts_once(tmp_path: Path) -> None:
    orders = [("a", "b"), ("b", "a")]
    base, better = [hits(0.6), hits(0.61)], [hits(0.8), hits(0.81)]
    rows = {
        name: [
            run(tmp_path / f"{name}{order}-{seed}", seed, right[order], orders[order])
            for order in (0, 1)
            for seed in range(seeds)
        ]
        for name, right, seeds in (("base", base, 3), ("better", better, 3))
    }
    once = {name: [one for one in row if one["seed"] == 0] for name, row in rows.items()}
    repeated, single = (compare_with_first(found)["better"] for found in (rows, once))
    assert repeated["pairs"] == 2 and repeated == single


def test_what_cannot_be_tested_is_named(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with expect_error("no-predictions", RunError):
        compare_with_first({"old": [{"seed": 0, "folder": str(tmp_path / "old")}]})
    mixed = [run(tmp_path / "a", 0, hits(0.5, 20)), run(tmp_path / "b", 1, hits(0.5, 30))]
    with expect_error("different-images", RunError):
        compare_with_first({"mixed": mixed})
