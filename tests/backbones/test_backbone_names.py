"""What a name tells of its weights, and what it may not be given to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import tiny_backbone
from expect import expect_error
from protosteer.backbones import Backbone
from protosteer.backbones.build_vit import derive_config
from protosteer.backbones.registry import known_weights
from protosteer.errors import WeightsError
from timm_oracle import import_timm, timm_embedding
from weight_toys import HALF, IMAGENET, statistics, tiny_weights, to_flax
from weight_toys import empty_caches as empty_caches  # a fixture for every test here


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
    with expect_error("unknown-preprocessing", WeightsError):
        Backbone.load(name, path, heads=3)
    assert statistics(Backbone.load(name, path, heads=3, mean=HALF[0], std=HALF[1])) == HALF


@pytest.mark.parametrize(
    ("alias", "maker"),
    [
        ("vit-tiny", "vit_tiny_patch16_224"),
        ("vit-small", "vit_small_patch16_224"),
        ("dinov2-small", "vit_small_patch14_reg4_dinov2"),
    ],
)
def test_a_small_one_has_the_shape_that_timm_gives_its_checkpoint(alias: str, maker: str) -> None:
    with torch.device("meta"):
        theirs = getattr(import_timm(), maker)(pretrained=False, num_classes=0, img_size=224)
    known = known_weights(alias)
    assert known and known.config == derive_config(theirs.state_dict())
    assert known.parameters == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("alias", ["vit-tiny", "vit-small", "vit", "deit", "dino", "dinov2-small"])
def test_a_short_name_has_the_preprocessing_and_licence_of_timm(alias: str) -> None:
    import_timm()
    from timm.models import get_pretrained_cfg

    known = known_weights(alias)
    assert known
    theirs, ours = get_pretrained_cfg(known.name), known.preprocessing
    assert (ours.mean, ours.std, ours.crop, ours.interpolation) == (
        theirs.mean, theirs.std, theirs.crop_pct, theirs.interpolation
    )  # fmt: skip
    assert theirs.hf_hub_id == f"timm/{known.name}" and theirs.license.lower() == known.licence.lower()


def test_real_vit_tiny_by_its_short_name(shared: Path) -> None:
    known = known_weights("vit-tiny")
    path = shared / "weights" / f"{known.name}.safetensors" if known else shared
    if not path.is_file():
        pytest.skip("no ViT-Tiny weights in the shared folder")
    backbone = Backbone.load("vit-tiny", weights=path)
    assert known and backbone.vit.config == known.config and (backbone.name, statistics(backbone)) == (known.name, HALF)
    timm = import_timm()
    theirs = timm.vit_tiny_patch16_224(pretrained=False)
    theirs.load_state_dict(load_file(path))
    images = torch.randn(1, 3, 224, 224)
    assert (backbone.embed(images) - timm_embedding(theirs, images)).abs().max() <= 1e-4


def test_dinov2_by_its_short_name_equals_timm_at_224_pixels(tmp_path: Path) -> None:
    timm = import_timm()
    made = timm.vit_small_patch14_reg4_dinov2(pretrained=False)  # for 518 pixels, as the checkpoint is
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    path = tmp_path / "cache" / "weights" / "vit_small_patch14_reg4_dinov2.lvd142m.safetensors"
    path.parent.mkdir(parents=True)
    save_file(made.state_dict(), path)
    path.with_suffix(".json").write_text('{"pretrained_cfg": {"input_size": [3, 518, 518]}}')
    backbone = Backbone.load("dinov2-small")
    assert (backbone.source, backbone.image_size) == (path, 224)
    theirs = timm.vit_small_patch14_reg4_dinov2(pretrained=False, img_size=224)
    theirs.load_state_dict(timm.checkpoint_filter_fn(made.state_dict(), theirs))
    images = torch.randn(1, 3, 224, 224)
    assert (backbone.embed(images) - timm_embedding(theirs, images)).abs().max() <= 1e-4


def test_another_architecture_does_not_pass_under_a_short_name(tmp_path: Path) -> None:
    with expect_error("other-architecture", WeightsError):
        Backbone.load("deit", tiny_weights(tmp_path / "w.safetensors"), heads=3)
    with expect_error("other-architecture", WeightsError):
        Backbone.load("mae", tiny_weights(tmp_path / "w.safetensors"), heads=3)
    dinov2 = known_weights("dinov2-small")
    assert dinov2
    dinov2.check(dinov2.config, tmp_path)
    with expect_error("other-architecture", WeightsError):
        dinov2.check(replace(dinov2.config, registers=0), tmp_path)


def test_auto_is_no_name() -> None:
    with expect_error("unknown-backbone", WeightsError):
        Backbone.load("auto")
