"""Confidence intervals and tests for compared runs, from the stored predictions after the last task.

- Interval: percentile bootstrap over test images. An image counts by its mean over the runs of a row, so runs on the
  same images are not taken for independent ones. The interval says nothing about other seeds or class orders.
- McNemar's test, exact: of the images that one run of two gets right and the other wrong, is the share 1/2? One p-value
  for each pair of runs with the same class order, seed and test images; the largest counts, which holds for every pair.
- Holm's correction of these p-values for the number of rows that are compared with the first.
- Paired t-test and Wilcoxon's signed-rank test over pairs of runs: do the mean accuracies differ over seeds and orders?
  Pairs that a method without randomness repeats, seed by seed, count once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from protosteer.errors import RunError
from protosteer.evaluation.predictions import Predictions

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 0

Values = npt.NDArray[np.float64]


def compare_with_first(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Compare every row with the first one.

    Args:
        rows: The runs of each row, as `comparison.gather` returns them.

    Returns:
        By label: `accuracy`, mean over images and runs in percent, with `accuracy_low` and `accuracy_high`. If the row
        has runs of the same class order, seed and test images as the first: how many different ones (`pairs`), `difference`
        from the first over them in percentage points, with `difference_low` and `difference_high`, `mcnemar_p`, `mcnemar_holm_p`, and with
        two pairs or more `t_p` and `wilcoxon_p`.

    Raises:
        RunError: A run has no stored predictions (code "no-predictions").
    """
    runs = {label: [_Hits(run) for run in row] for label, row in rows.items()}
    first, *others = runs
    found = {label: _accuracy(row) for label, row in runs.items()}
    for label in others:
        found[label] |= _differences(runs[label], runs[first])
    raw = {label: found[label]["mcnemar_p"] for label in others if "mcnemar_p" in found[label]}
    for label, p in zip(raw, holm(list(raw.values())), strict=True):
        found[label]["mcnemar_holm_p"] = p
    return found


class _Hits:
    """Whether each test image of a run was classified correctly, in an order that class orders do not change."""

    def __init__(self, run: Mapping[str, Any]):
        folder = Path(run["folder"])
        files = sorted(folder.glob("predictions-*.npz"))
        predictions = Predictions.load(files[-1] if files else folder / "predictions.npz")
        # Within a class, images are in file order in every stream.
        names = predictions.classes[predictions.actual]
        order = np.argsort(names, kind="stable")
        self.labels, self.right = names[order], predictions.right[order]
        self.images = run.get("test_images")
        self.key = tuple(predictions.classes), run["seed"]

    def same_images(self, other: _Hits) -> bool:
        alike = self.images == other.images and len(self.labels) == len(other.labels)
        return alike and bool((self.labels == other.labels).all())


def _accuracy(row: Sequence[_Hits]) -> dict[str, Any]:
    if not all(hits.same_images(row[0]) for hits in row):
        message = "the runs of a row have different test images; compare them under labels of their own (LABEL=FOLDER)"
        raise RunError(message, code="different-images")
    means = np.mean([hits.right for hits in row], axis=0)
    low, high = bootstrap(means)
    return {"accuracy": 100 * float(means.mean()), "accuracy_low": 100 * low, "accuracy_high": 100 * high}


def _differences(row: Sequence[_Hits], reference: Sequence[_Hits]) -> dict[str, Any]:
    known = {hits.key: hits for hits in reference}
    pairs = [(hits, known[hits.key]) for hits in row if hits.key in known and hits.same_images(known[hits.key])]
    # A method without randomness predicts the same under every seed: two such runs are no further evidence.
    pairs = list(
        {(hits.key[0], hits.right.tobytes(), other.right.tobytes()): (hits, other) for hits, other in pairs}.values()
    )
    if not pairs:
        return {"pairs": 0}
    gaps = np.array([own.right.astype(float) - other.right for own, other in pairs])  # [pairs, images]
    low, high = bootstrap(gaps.mean(axis=0))
    found: dict[str, Any] = {
        "pairs": len(pairs),
        "difference": 100 * float(gaps.mean()),
        "difference_low": 100 * low,
        "difference_high": 100 * high,
        "mcnemar_p": max(mcnemar(own.right, other.right) for own, other in pairs),
    }
    return found | (paired_tests(gaps.mean(axis=1)) if len(pairs) > 1 else {})


def bootstrap(values: Values) -> tuple[float, float]:
    """Return the percentile interval of the mean of values [N] over resampled images."""
    draw = np.random.default_rng(SEED)
    kinds, counts = np.unique(values, return_counts=True)  # few: means over a few runs of 0 and 1
    means = draw.multinomial(len(values), counts / len(values), RESAMPLES) @ kinds / len(values)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mcnemar(first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_]) -> float:
    """Return the exact two-sided p-value of McNemar's test: images that only one of two runs gets right."""
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    if only_first == only_second:
        return 1.0
    return float(stats.binomtest(only_first, only_first + only_second).pvalue)


def paired_tests(differences: Values) -> dict[str, float | None]:
    """Return p-values that differences [pairs] have mean zero (t) and are symmetric around it (Wilcoxon).

    Both are 1 if all differences are zero. The t-test is None if they are equal, which leaves no variance.
    """
    if not differences.any():
        return {"t_p": 1.0, "wilcoxon_p": 1.0}
    equal = np.ptp(differences) == 0
    t = None if equal else float(stats.ttest_1samp(differences, 0.0).pvalue)
    return {"t_p": t, "wilcoxon_p": float(stats.wilcoxon(differences).pvalue)}


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm, 1979)."""
    order = np.argsort(p, kind="stable")
    scaled = np.maximum.accumulate([min(1.0, (len(p) - i) * p[k]) for i, k in enumerate(order)])
    corrected = np.empty(len(p))
    corrected[order] = scaled
    return [float(value) for value in corrected]
