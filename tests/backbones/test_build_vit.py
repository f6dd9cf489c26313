"""Whatever is not such a ViT is refused, by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from expect import expect_error
from protosteer.backbones.build_vit import derive_config, load_vit
from protosteer.backbones.checkpoint_io import METADATA_KEY, read_checkpoint
from protosteer.errors import WeightsError
from protosteer.paper.vit import ViT, ViTConfig
from timm_oracle import import_timm, timm_embedding
from weight_toys import StateDict, published, random_vit, write_weights


@pytest.fixture
def state() -> StateDict:
    return published(random_vit())


def test_original_dinov2_registers_equal_timm_converting_them(tmp_path: Path) -> None:
    """Its class token has a position and its registers have none; timm folds that position into the token."""
    timm = import_timm()
    vit = random_vit(registers=4, layer_scale=True)
    original = vit.state_dict() | {"mask_token": torch.ones(1, 24)}
    original["register_tokens"] = original.pop("reg_token")
    loaded, _ = load_vit(read_checkpoint(write_weights(tmp_path / "w.pth", original)), heads=3)
    model = timm.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, mlp_ratio=40 / 24, num_classes=0,
        reg_tokens=4, no_embed_class=True, init_values=1.0,
    )  # fmt: skip
    model.load_state_dict(timm.checkpoint_filter_fn(original, model))
    images = torch.randn(2, 3, 16, 16)
    assert (loaded(images) - timm_embedding(model, images)).abs().max() <= 1e-4


def changed(**changes: Tensor | None) -> Callable[[StateDict], StateDict]:
    names = {key.replace("__", "."): value for key, value in changes.items()}
    return lambda s: {k: v for k, v in (s | names).items() if v is not None}


REFUSED: dict[str, tuple[Callable[[StateDict], StateDict], str, str]] = {
    "missing": (changed(norm__bias=None), "other-architecture", "norm.bias"),
    "missing anchor": (changed(cls_token=None), "other-architecture", "cls_token"),
    "distilled": (changed(dist_token=torch.zeros(1, 1, 24)), "other-architecture", "dist_token"),
    "unexpected in a block": (
        changed(blocks__1__attn__q_norm__weight=torch.ones(8)),
        "other-architecture",
        "blocks.1.attn.q_norm.weight",
    ),
    "both norms": (
        changed(fc_norm__weight=torch.ones(24), fc_norm__bias=torch.ones(24)),
        "other-architecture",
        "norm.bias, norm.weight",
    ),
    "shape": (changed(norm__bias=torch.ones(23)), "other-architecture", "norm.bias [23]"),
    "width": (changed(cls_token=torch.ones(1, 1, 23)), "other-architecture", "cls_token [1, 1, 23]"),
    "gray images": (changed(patch_embed__proj__weight=torch.ones(24, 1, 4, 4)), "other-architecture", "[24, 1, 4, 4]"),
    "oblong grid": (changed(pos_embed=torch.ones(1, 1 + 12, 24)), "other-architecture", "pos_embed [1, 13, 24]"),
    "hole": (changed(blocks__3__norm1__bias=torch.ones(24)), "other-architecture", "3"),
    "far block": (changed(blocks__200000__norm1__bias=torch.ones(24)), "other-architecture", "200000"),
    "endless block": (changed(**{f"blocks__{'9' * 5000}__x": torch.ones(24)}), "other-architecture", "9" * 100),
    "registers": (changed(reg_token=torch.ones(24)), "other-architecture", "reg_token [24]"),
    "nothing in it": (changed(norm__bias=torch.ones(0)), "damaged-weights", "norm.bias"),
    "control characters": (changed(**{"\x1b[2J\nx": torch.ones(2)}), "other-architecture", "?[2J?x"),
    "nan": (changed(norm__bias=torch.full((24,), torch.nan)), "damaged-weights", "norm.bias"),
    "integers": (changed(norm__bias=torch.ones(24, dtype=torch.int8)), "damaged-weights", "norm.bias"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_this_vit_is_refused_by_name(fault: str, state: StateDict, tmp_path: Path) -> None:
    change, code, key = REFUSED[fault]
    path = write_weights(tmp_path / "w.safetensors", change(state))
    with expect_error(code, WeightsError, path=path) as caught:
        load_vit(read_checkpoint(path), heads=3)
    assert key in str(caught.value)


def test_another_network_names_a_few_keys_and_how_many(tmp_path: Path) -> None:
    resnet = {f"layer{i}.conv.weight": torch.ones(2, 2) for i in range(40)}
    with pytest.raises(WeightsError) as caught:
        load_vit(read_checkpoint(write_weights(tmp_path / "w.safetensors", resnet)))
    message = str(caught.value)
    assert "cls_token" in message and "layer0.conv.weight" in message and "and 35 more" in message
    assert message.count("layer") == 5 and "\n" not in message


@pytest.mark.parametrize("dim, heads", [(192, 3), (384, 6), (768, 12), (1024, 16), (1280, 16)])
def test_heads_follow_from_the_width(dim: int, heads: int) -> None:
    with torch.device("meta"):
        tensors = ViT(ViTConfig(32, 16, dim, 1, heads, 8)).state_dict()
    assert derive_config(tensors).heads == heads


def test_heads_that_nothing_tells_or_that_do_not_divide(state: StateDict, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_weights(tmp_path / "w.safetensors", state))
    with expect_error("unknown-heads", WeightsError):
        load_vit(checkpoint)
    for heads in (0, 5):
        with expect_error("unknown-heads", WeightsError):
            load_vit(checkpoint, heads=heads)


def test_metadata_wins_over_a_config_and_an_argument_over_both(state: StateDict, tmp_path: Path) -> None:
    path, config = tmp_path / "w.safetensors", tmp_path / "config.json"
    config.write_text(json.dumps({"model_args": {"num_heads": 6}, "pretrained_cfg": {"crop_pct": 0.8}}))
    save_file(state, path)
    assert load_vit(read_checkpoint(path, config))[0].config.heads == 6
    save_file(state, path, metadata={METADATA_KEY: json.dumps({"heads": 3, "image_size": 24})})
    checkpoint = read_checkpoint(path, config)
    assert checkpoint.about == {"heads": 3, "image_size": 24, "crop": 0.8}
    config_then = load_vit(checkpoint)[0].config
    assert (config_then.heads, config_then.image_size) == (3, 24)
    config_then = load_vit(checkpoint, heads=2, image_size=8)[0].config
    assert (config_then.heads, config_then.image_size) == (2, 8)


def test_a_config_with_another_pooling_is_refused(state: StateDict, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"global_pool": "avg"}))
    with expect_error("other-architecture", WeightsError):
        load_vit(read_checkpoint(write_weights(tmp_path / "w.safetensors", state), config), heads=3)
    config.write_text("[1]")
    with expect_error("bad-weights-config", WeightsError):
        read_checkpoint(tmp_path / "w.safetensors", config)


@pytest.mark.parametrize("size", [0, 2, 18])
def test_image_size_must_be_whole_patches(size: int, state: StateDict, tmp_path: Path) -> None:
    with expect_error("bad-image-size", WeightsError):
        load_vit(read_checkpoint(write_weights(tmp_path / "w.safetensors", state)), heads=3, image_size=size)


def test_fingerprint_tells_apart_whatever_computes_differently(state: StateDict, tmp_path: Path) -> None:
    def fingerprint(state: StateDict, **options: Any) -> str:
        path = write_weights(tmp_path / "w.safetensors", state)
        return load_vit(read_checkpoint(path), **{"heads": 3} | options)[1]

    first = fingerprint(state)
    assert first == fingerprint(state) and len(first) == 64
    assert first == fingerprint(state | {"head.bias": torch.zeros(7)})
    nudged = state["norm.bias"].clone()
    nudged[0] += 1e-4
    pooled = {name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: t for name, t in state.items()}
    others = [
        fingerprint(state | {"norm.bias": nudged}),
        fingerprint(pooled),
        fingerprint(state, heads=2),
        fingerprint(state, image_size=32),
    ]
    assert len({first, *others}) == 5
