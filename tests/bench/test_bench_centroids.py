"""The reference of the centroids finds the same ones, and ours without the matrix of all pairs."""

from __future__ import annotations

import pytest
import torch

from protosteer.bench import centroids as bench
from protosteer.method import prototypes
from protosteer.method.prototypes import centroids

pytestmark = pytest.mark.slow


def test_the_reference_finds_the_same_centroids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prototypes, "DENSE_LIMIT", 0)  # the factored path, as for a large class
    embeddings = bench.cone(400, 24)
    labels, means, deviations = bench.reference(embeddings, 5)
    ours = centroids(embeddings, 5)
    assert len(labels) == 400 and len(means) == 5
    order = torch.cdist(means, ours.means).argmin(dim=1)
    assert sorted(order.tolist()) == list(range(5))
    torch.testing.assert_close(means, ours.means[order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(deviations, ours.deviations[order], rtol=1e-4, atol=1e-4)
    assert bench.agreement(labels, embeddings) == pytest.approx(1.0)
    assert bench.agreement(labels[::-1], embeddings) < 0.5


def test_the_peak_is_far_below_the_matrix_of_all_pairs() -> None:
    assert bench.peak_bytes(bench.cone(1000, 16), 5) > 8 * 1000**2  # the dense path, for ordinary classes
    assert bench.peak_bytes(bench.cone(2000, 16), 5) < 2000**2  # the factored path


def test_the_less_favourable_width_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([[4.0, 1.0], [3.0, 1.0]])

    def interleaved(sides, repeats, warm_up):
        assert list(sides) == ["reference", "ours"]
        return {side: [seconds] * repeats for side, seconds in zip(sides, next(values), strict=True)}

    monkeypatch.setattr(bench, "interleaved", interleaved)
    monkeypatch.setattr(bench, "IMAGES", 60)
    monkeypatch.setattr(bench, "DIMENSIONS", (8, 12))
    (ratio,) = bench.run(2)
    assert (ratio.name, ratio.value, ratio.target) == ("centroids", 3.0, 20.0)
    assert [note.split(":")[0] for note in ratio.notes] == ["width 8", "width 8", "width 12", "width 12"]
    assert "Rand index" in ratio.notes[0] and "MB" in ratio.notes[1]


def test_a_measurement_of_a_tiny_class() -> None:
    ratio = bench.measure(60, 8, repeats=1)
    assert ratio.value > 0 and ratio.spread == 0
