"""What a name tells of its weights, and what it may not be given to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import tiny_backbone
from protosteer.backbones import Backbone
from protosteer.errors import WeightsError
from weight_toys import HALF, IMAGENET, statistics, tiny_weights, to_flax


@pytest.mark.parametrize(
    "name, expected, crop",
    [
        ("deit_tiny_patch16_224", IMAGENET, 0.9),
        ("deit3_small_patch16_224.fb_in1k", IMAGENET, 0.9),
        ("vit_small_patch8_224.dino", IMAGENET, 0.9),
        ("dino_vitbase16_pretrain", IMAGENET, 0.9),
        ("vit_base_patch14_reg4_dinov2.lvd142m", IMAGENET, 1.0),
        ("vit_large_patch16_224.mae", IMAGENET, 0.9),
        ("mae_finetuned_vit_large", IMAGENET, 0.875),
        ("vit_tiny_patch16_224.augreg_in21k", HALF, 0.9),
        ("vit_base_patch32_224.orig_in21k", HALF, 0.9),
    ],
)
def test_a_usual_name_tells_the_statistics(name: str, expected: Any, crop: float, tmp_path: Path) -> None:
    backbone = Backbone.load(name, tiny_weights(tmp_path / "w.safetensors"), heads=3)
    assert statistics(backbone) == expected
    assert (backbone.preprocessing.crop, backbone.preprocessing.interpolation) == (crop, "bicubic")


def test_googles_npz_means_half(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **to_flax(tiny_backbone().vit.state_dict(), heads=3))
    assert statistics(Backbone.load("b16", tmp_path / "w.npz")) == HALF


@pytest.mark.parametrize("name", ["shop", "maestro", "vit_of_mine"])
def test_statistics_that_nothing_tells_are_asked_for(name: str, tmp_path: Path) -> None:
    path = tiny_weights(tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=f"'{name}'.*pass mean= and std="):
        Backbone.load(name, path, heads=3)
    assert statistics(Backbone.load(name, path, heads=3, mean=HALF[0], std=HALF[1])) == HALF


def test_another_architecture_does_not_pass_under_a_short_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="width 24, depth 2"):
        Backbone.load("deit", tiny_weights(tmp_path / "w.safetensors"), heads=3)
    with pytest.raises(WeightsError, match="self-supervised"):
        Backbone.load("mae", tiny_weights(tmp_path / "w.safetensors"), heads=3)
