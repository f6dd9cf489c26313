"""The parts of nano's recipe that can be checked in closed form, and a training run of three steps."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import torch

import pretrain_nano
from procedural import random_glyphs
from protosteer.backbones import Backbone


def ramp(angle: float) -> torch.Tensor:
    """An image that gets brighter in one direction, evenly."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    value = 0.5 + 0.3 * (x * np.cos(angle) + y * np.sin(angle))
    return value.float().expand(1, 3, 32, 32)


@pytest.mark.parametrize("direction", range(12))
def test_a_ramp_votes_for_its_own_direction_alone(direction):
    histogram = pretrain_nano.edges(ramp(2 * np.pi * direction / 12)).reshape(12, 4, 4)
    inner = histogram[:, 1:3, 1:3].sum(dim=(1, 2))
    assert int(inner.argmax()) == direction
    assert inner[direction] > 20 * (
        inner.sum() - inner[direction] - inner.roll(1)[direction] - inner.roll(-1)[direction]
    )


def test_votes_fall_into_the_cell_where_the_edge_is():
    image = torch.zeros(1, 3, 32, 32)
    image[..., 18:22, 2:6] = 1.0
    cells = pretrain_nano.edges(image).reshape(12, 4, 4).sum(dim=0)
    assert divmod(int(cells.argmax()), 4) == (2, 0)
    assert cells[0, 3] < 0.2 * cells[2, 0]


def test_description_does_not_depend_on_contrast():
    glyph = random_glyphs(4, torch.Generator().manual_seed(0))
    pale = 0.25 + 0.5 * glyph
    torch.testing.assert_close(pretrain_nano.edges(glyph), pretrain_nano.edges(pale), rtol=0, atol=0.02)


def test_glyphs_are_seeded_and_differ():
    first, again = (random_glyphs(6, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again) and first.shape == (6, 3, 32, 32)
    assert first.min() >= 0 and first.max() <= 1
    assert all((first[0] - other).abs().mean() > 0.01 for other in first[1:])


def test_reducer_is_a_pca():
    from sklearn.decomposition import PCA

    points = torch.randn(60, 8, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 9)
    expected = torch.from_numpy(PCA(3).fit_transform(points.double().numpy())).float()
    actual = pretrain_nano.Reducer(points, 3)(points)
    cosine = torch.nn.functional.cosine_similarity(actual.abs(), expected.abs(), dim=1)
    torch.testing.assert_close(cosine, torch.ones(60), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_three_steps_write_weights_that_the_package_loads(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, (40, 3072), dtype=np.uint8)
    table = {"data": rows, "fine_labels": [i % 10 for i in range(40)]}
    for split in ("train", "test"):
        (tmp_path / split).write_bytes(pickle.dumps(table, protocol=2))
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": ["x"] * 100}, protocol=2))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    weights = []
    for name in ("one", "two"):
        words = (
            f"--recipe procedural --steps 3 --batch 8 --cifar {tmp_path} --out {tmp_path / name}.safetensors"
        )
        monkeypatch.setattr(sys, "argv", ["pretrain_nano.py", *words.split()])
        pretrain_nano.main()
        weights.append((tmp_path / f"{name}.safetensors").read_bytes())
    assert weights[0] == weights[1], "the recipe is not deterministic"
    assert Backbone.load("nano", weights=tmp_path / "one.safetensors").vit.config == pretrain_nano.NANO
    assert len(weights[0]) <= 4_000_000


def test_shipped_weights_are_small_and_of_this_architecture():
    backbone = Backbone.load("nano")
    assert backbone.vit.config == pretrain_nano.NANO
    assert backbone.source is not None and backbone.source.stat().st_size <= 4_000_000
