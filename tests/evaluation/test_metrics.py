"""Metrics against hand-worked examples and a loop-by-loop twin."""

import random

import pytest
import torch

from protosteer.evaluation import metrics
from protosteer.util import statistics

HAND = [[90.0], [80.0, 70.0], [85.0, 60.0, 50.0]]


def test_hand_worked_example():
    figures = metrics.summary(HAND)
    assert figures["last_accuracy"] == pytest.approx((85 + 60 + 50) / 3)
    assert figures["avg_accuracy"] == pytest.approx((90 + 75 + 65) / 3)
    # F_2 = 90 - 80; F_3 = mean(max(90 - 85, 80 - 85), 70 - 60)
    assert metrics.forgetting(HAND, 1) == pytest.approx(10)
    assert figures["last_forgetting"] == pytest.approx((5 + 10) / 2)
    assert figures["avg_forgetting"] == pytest.approx((10 + 7.5) / 2)


def test_forgetting_is_not_clipped():
    assert metrics.forgetting([[50.0], [60.0, 70.0]], 1) == pytest.approx(-10)


def test_one_task_has_nothing_to_forget():
    assert metrics.summary([[40.0]]) == {
        "last_accuracy": 40.0, "avg_accuracy": 40.0, "last_forgetting": 0.0, "avg_forgetting": 0.0,
        "clipped_forgetting": 0.0, "backward_transfer": 0.0,
    }  # fmt: skip


def test_random_matrices_agree_with_a_twin():
    rng = random.Random(0)
    for tasks in range(2, 8):
        matrix = [[rng.uniform(0, 100) for _ in range(i + 1)] for i in range(tasks)]
        per_step = []
        for i in range(1, tasks):
            total = 0.0
            for j in range(i):
                best = -1000.0
                for moment in range(j, i):
                    best = max(best, matrix[moment][j] - matrix[i][j])
                total += best
            per_step.append(total / i)
        figures = metrics.summary(matrix)
        assert figures["last_forgetting"] == pytest.approx(per_step[-1])
        assert figures["avg_forgetting"] == pytest.approx(sum(per_step) / len(per_step))


def test_both_averages_with_unequal_tasks():
    figures = metrics.summary(HAND, [10, 30, 60])
    assert figures["last_accuracy"] == pytest.approx(65)
    assert figures["last_image_accuracy"] == pytest.approx((85 * 10 + 60 * 30 + 50 * 60) / 100)
    second = (80 * 10 + 70 * 30) / 40
    assert figures["avg_image_accuracy"] == pytest.approx((90 + second + 56.5) / 3)


def test_calibration_error_by_hand():
    """Ten images 95 % sure, nine of them right; ten 30 % sure, none right: 5 and 30 points off."""
    sure = torch.tensor([0.95] * 10 + [0.30] * 10)
    right = torch.tensor([True] * 9 + [False] * 11)
    bins = statistics.reliability(sure, right)
    assert len(bins) == 15 and [b["images"] for b in bins if b["images"]] == [10, 10]
    assert bins[14]["accuracy"] == pytest.approx(90) and bins[14]["confidence"] == pytest.approx(95)
    assert bins[0] == {"images": 0, "confidence": None, "accuracy": None}
    assert statistics.calibration_error(bins) == pytest.approx((5 + 30) / 2)
    edges = statistics.reliability(torch.tensor([0.0, 0.2, 1.0]), torch.tensor([False, False, True]))
    assert [i for i, b in enumerate(edges) if b["images"]] == [0, 3, 14]
    assert statistics.calibration_error(edges) == pytest.approx(20 / 3)


def test_calibration_error_agrees_with_a_twin():
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        sure = torch.rand(200, generator=draw)
        right = torch.rand(200, generator=draw) < sure**2
        expected = 0.0
        for k in range(15):
            some = [i for i in range(200) if k / 15 <= float(sure[i]) < (k + 1) / 15]
            if some:
                apart = sum(float(sure[i]) for i in some) - sum(bool(right[i]) for i in some)
                expected += abs(apart) / 200
        assert statistics.calibration_error(statistics.reliability(sure, right)) == pytest.approx(100 * expected)
        halves = [statistics.reliability(sure[half], right[half]) for half in (slice(50), slice(50, None))]
        for one, both in zip(metrics.pooled(halves), statistics.reliability(sure, right), strict=True):
            assert one == pytest.approx(both)


def test_over_seeds_by_hand():
    nan = float("nan")
    seeds = [
        {"seed": 4, "last_accuracy": 70.0, "passes": 3, "matrix": [[1.0]], "retrieval": None, "nan": nan},
        {"seed": 9, "last_accuracy": 74.0, "passes": 3, "matrix": [[2.0]], "retrieval": 5.0, "nan": 1.0},
    ]
    mean, std = metrics.over_seeds(seeds)
    assert mean == {"last_accuracy": 72.0, "passes": 3.0}
    assert std["last_accuracy"] == pytest.approx(8**0.5) and std["passes"] == 0.0
    alone = metrics.over_seeds(seeds[1:])[1]
    assert alone == dict.fromkeys(["last_accuracy", "passes", "retrieval", "nan"], 0.0)


def test_backward_and_forward_transfer_and_clipped_forgetting_by_hand():
    matrix = [[90.0], [80.0, 70.0], [95.0, 60.0, 50.0]]
    found = metrics.summary(matrix)
    assert found["backward_transfer"] == pytest.approx(((95 - 90) + (60 - 70)) / 2)
    assert found["last_forgetting"] == pytest.approx(((90 - 95) + (70 - 60)) / 2)
    assert found["clipped_forgetting"] == pytest.approx((0 + 10) / 2)
    assert metrics.forward_transfer([40.0, None, 80.0], [4, 5, 10]) == pytest.approx(((40 - 25) + (80 - 10)) / 2)
    assert metrics.forward_transfer([None, None], [2, 4]) is None
