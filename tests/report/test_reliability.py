"""The reliability plot shows the bins that it is given, all seeds together."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image

from protosteer.evaluation import metrics
from protosteer.report.reliability import reliability_plot


def bins(seed: int) -> metrics.Bins:
    draw = torch.Generator().manual_seed(seed)
    sure = torch.rand(300, generator=draw) ** 0.5
    return metrics.reliability(sure, torch.rand(300, generator=draw) < sure)


def test_points_and_shares_are_those_of_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[tuple[float, float]] = []
    shares: list[np.ndarray] = []
    scatter, stairs = Axes.scatter, Axes.stairs

    def seen(self: Axes, x: np.ndarray, y: np.ndarray, **more: object) -> object:
        points.extend(zip(x.tolist(), y.tolist(), strict=True))
        return scatter(self, x, y, **more)

    monkeypatch.setattr(Axes, "scatter", seen)
    monkeypatch.setattr(
        Axes, "stairs", lambda self, h, *a, **k: (shares.append(h), stairs(self, h, *a, **k))[1]
    )
    seeds = [bins(0), bins(1)]
    png = reliability_plot({"a [$name$]": seeds})
    expected = [(b["confidence"], b["accuracy"]) for b in metrics.pooled(seeds) if b["images"]]
    assert np.array(sorted(points)) == pytest.approx(np.array(sorted(expected)))
    assert shares[0].tolist() == pytest.approx([b["images"] / 6 for b in metrics.pooled(seeds)])
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert 500 < pixels.shape[0] < 1000 and 500 < pixels.shape[1] < 1000
    edges = (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])
    assert all((edge == 255).all() for edge in edges), "nothing is cut off"


def test_the_same_figures_make_the_same_picture() -> None:
    assert reliability_plot({"a": [bins(0)]}) == reliability_plot({"a": [bins(0)]})
    assert reliability_plot({"a": [bins(0)]}) != reliability_plot({"a": [bins(1)]})


def test_long_names_make_a_taller_picture_not_a_smaller_plot() -> None:
    def height(name: str) -> int:
        return Image.open(io.BytesIO(reliability_plot({f"{name} {i}": [bins(i)] for i in range(4)}))).height

    assert height("a name of many words " * 10) > height("a") + 200
