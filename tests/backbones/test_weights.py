"""Every container gives the same ViT; whatever is not such a ViT is refused, by name, and runs no code."""

from __future__ import annotations

import argparse
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from protosteer.backbones.formats import METADATA_KEY, read_checkpoint
from protosteer.backbones.weights import derive_config, load_vit
from protosteer.errors import WeightsError
from protosteer.method.vit import ViT, ViTConfig
from timm_oracle import import_timm, randomise, timm_embedding

SHAPE = {"image_size": 16, "patch_size": 4, "dim": 24, "depth": 2, "heads": 3, "mlp_dim": 40}
State = dict[str, Tensor]


@pytest.fixture
def vit() -> ViT:
    vit = ViT(ViTConfig(**SHAPE))
    randomise(vit)
    return vit


@pytest.fixture
def state(vit: ViT) -> State:
    """As published: with a classifier."""
    return vit.state_dict() | {"head.weight": torch.randn(7, 24), "head.bias": torch.randn(7)}


def to_flax(
    state: State, heads: int, late: bool = False, stacked: bool = False, prefix: str = ""
) -> dict[str, Any]:
    """Google's layout, early or late numbering of a block's parts, blocks apart or stacked."""
    s = {name: tensor.numpy() for name, tensor in state.items()}
    dim, depth = s["cls_token"].shape[-1], len([name for name in s if name.endswith("norm1.bias")])
    attention, mlp, norm2 = (0, 0, 1) if late else (1, 3, 2)
    flax = {
        "cls": s["cls_token"],
        "embedding/kernel": s["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": s["patch_embed.proj.bias"],
        "pos_embedding" if late else "Transformer/posembed_input/pos_embedding": s["pos_embed"],
        "Transformer/encoder_norm/scale": s["norm.weight"],
        "Transformer/encoder_norm/bias": s["norm.bias"],
        "head/kernel": np.ones((dim, 7), np.float32),
        "head/bias": np.ones(7, np.float32),
        "pre_logits/kernel": np.ones((dim, dim), np.float32),
        "pre_logits/bias": np.ones(dim, np.float32),
    }
    blocks: list[dict[str, Any]] = []
    for i in range(depth):
        b = {name.removeprefix(f"blocks.{i}."): array for name, array in s.items()}
        block = {"LayerNorm_0/scale": b["norm1.weight"], "LayerNorm_0/bias": b["norm1.bias"]}
        block |= {f"LayerNorm_{norm2}/scale": b["norm2.weight"], f"LayerNorm_{norm2}/bias": b["norm2.bias"]}
        for j, name in enumerate(["query", "key", "value"]):
            rows = slice(j * dim, (j + 1) * dim)
            at = f"MultiHeadDotProductAttention_{attention}/{name}"
            block[f"{at}/kernel"] = b["attn.qkv.weight"][rows].T.reshape(dim, heads, -1)
            block[f"{at}/bias"] = b["attn.qkv.bias"][rows].reshape(heads, -1)
        at = f"MultiHeadDotProductAttention_{attention}/out"
        block |= {
            f"{at}/kernel": b["attn.proj.weight"].T.reshape(heads, -1, dim),
            f"{at}/bias": b["attn.proj.bias"],
        }
        for j in range(2):
            at = f"MlpBlock_{mlp}/Dense_{j}"
            block |= {f"{at}/kernel": b[f"mlp.fc{j + 1}.weight"].T, f"{at}/bias": b[f"mlp.fc{j + 1}.bias"]}
        blocks.append(block)
    if stacked:
        flax |= {f"Transformer/encoderblock/{k}": np.stack([b[k] for b in blocks]) for k in blocks[0]}
    else:
        flax |= {f"Transformer/encoderblock_{i}/{k}": b[k] for i, b in enumerate(blocks) for k in b}
    return {prefix + name: array for name, array in flax.items()}


def write(path: Path, content: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    else:
        torch.save(content, path)
    return path


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


CONTAINERS: dict[str, tuple[str, Callable[[State], Any]]] = {
    "safetensors": (".safetensors", dict),
    "bare pth": (".pth", OrderedDict),
    "deit": (".pth", lambda s: {"model": s}),
    "deit training": (".pth", lambda s: {"model": s, "epoch": 3, "args": argparse.Namespace(lr=0.1)}),
    "parallel": (".pth", lambda s: {"state_dict": prefixed(s, "module.")}),
    "dino training": (
        ".pth",
        lambda s: {
            "student": prefixed({name: tensor + 1 for name, tensor in s.items()}, "module.backbone."),
            "teacher": prefixed(s, "backbone.") | {"head.mlp.0.weight": torch.ones(3, 3)},
            "args": argparse.Namespace(arch="vit_base"),
        },
    ),
    "mask token": (".pth", lambda s: s | {"mask_token": torch.zeros(1, 24)}),
    "npz": (".npz", lambda s: to_flax(s, 3)),
    "npz, late numbering": (".npz", lambda s: to_flax(s, 3, late=True, prefix="params/")),
    "npz, stacked": (".npz", lambda s: to_flax(s, 3, late=True, stacked=True)),
    "npz, optimiser beside": (
        ".npz",
        lambda s: to_flax(s, 3, prefix="opt/target/") | {"opt/step": np.ones(1)},
    ),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_the_same_vit(container: str, vit: ViT, state: State, tmp_path: Path) -> None:
    suffix, pack = CONTAINERS[container]
    checkpoint = read_checkpoint(write(tmp_path / f"w{suffix}", pack(state)))
    loaded, fingerprint = load_vit(checkpoint, heads=None if suffix == ".npz" else 3)
    assert loaded.config == vit.config
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in vit.state_dict().items())
    _, plain = load_vit(read_checkpoint(write(tmp_path / "plain.safetensors", vit.state_dict())), heads=3)
    assert fingerprint == plain
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("late", [False, True])
def test_npz_equals_timm_reading_it(late: bool, vit: ViT, state: State, tmp_path: Path) -> None:
    timm = import_timm()
    path = write(tmp_path / "w.npz", to_flax(state, 3, late=late, prefix="params/" if late else ""))
    model = timm.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, mlp_ratio=40 / 24, num_classes=0
    )
    model.load_pretrained(path)
    images = torch.randn(2, 3, 16, 16)
    loaded, _ = load_vit(read_checkpoint(path))
    assert (loaded(images) - timm_embedding(model, images)).abs().max() <= 1e-4


def test_original_dinov2_registers_equal_timm_converting_them(tmp_path: Path) -> None:
    """Its class token has a position and its registers have none; timm folds that position into the token."""
    timm = import_timm()
    vit = ViT(ViTConfig(**SHAPE | {"registers": 4, "layer_scale": True}))
    randomise(vit)
    original = vit.state_dict() | {"mask_token": torch.ones(1, 24)}
    original["register_tokens"] = original.pop("reg_token")
    loaded, _ = load_vit(read_checkpoint(write(tmp_path / "w.pth", original)), heads=3)
    model = timm.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, mlp_ratio=40 / 24, num_classes=0,
        reg_tokens=4, no_embed_class=True, init_values=1.0,
    )  # fmt: skip
    model.load_state_dict(timm.checkpoint_filter_fn(original, model))
    images = torch.randn(2, 3, 16, 16)
    assert (loaded(images) - timm_embedding(model, images)).abs().max() <= 1e-4


class Bomb:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_code_in_a_pth_is_refused_and_not_run(state: State, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = write(tmp_path / "w.pth", {"model": state, "extra": Bomb(mark)})
    with pytest.raises(WeightsError, match="run code") as caught:
        read_checkpoint(path)
    assert not mark.exists()
    assert "\n" not in str(caught.value)
    path.write_bytes(pickle.dumps(Bomb(mark), protocol=2))
    with pytest.raises(WeightsError):
        read_checkpoint(path)
    assert not mark.exists()


def test_pickled_objects_in_an_npz_are_refused(state: State, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    arrays = to_flax(state, 3) | {"extra": np.array([Bomb(mark)], dtype=object)}
    with pytest.raises(WeightsError, match="npz"):
        read_checkpoint(write(tmp_path / "w.npz", arrays))
    assert not mark.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04broken"])
def test_a_damaged_file_is_refused_in_one_line(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=f"w{suffix}.*damaged") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_absent_file_and_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no weights file"):
        read_checkpoint(tmp_path / "w.pth")
    (tmp_path / "w.onnx").touch()
    with pytest.raises(WeightsError, match=".safetensors, .pth, .pt, .npz"):
        read_checkpoint(tmp_path / "w.onnx")


def changed(**changes: Tensor | None) -> Callable[[State], State]:
    names = {key.replace("__", "."): value for key, value in changes.items()}
    return lambda s: {k: v for k, v in (s | names).items() if v is not None}


REFUSED: dict[str, tuple[Callable[[State], State], str]] = {
    "missing": (changed(norm__bias=None), "missing: norm.bias$"),
    "missing anchor": (changed(cls_token=None), "missing: cls_token$"),
    "distilled": (changed(dist_token=torch.zeros(1, 1, 24)), "unexpected: dist_token$"),
    "unexpected in a block": (
        changed(blocks__1__attn__q_norm__weight=torch.ones(8)),
        "unexpected: blocks.1.attn.q_norm.weight$",
    ),
    "both norms": (
        changed(fc_norm__weight=torch.ones(24), fc_norm__bias=torch.ones(24)),
        "unexpected: norm.bias, norm.weight$",
    ),
    "shape": (changed(norm__bias=torch.ones(23)), r"wrong shape: norm.bias \[23\], not \[24\]$"),
    "width": (changed(cls_token=torch.ones(1, 1, 23)), r"cls_token \[1, 1, 23\], not \[1, 1, 24\]"),
    "gray images": (changed(patch_embed__proj__weight=torch.ones(24, 1, 4, 4)), r"\[24, 1, 4, 4\]"),
    "oblong grid": (changed(pos_embed=torch.ones(1, 1 + 12, 24)), r"pos_embed \[1, 13, 24\]"),
    "hole": (changed(blocks__3__norm1__bias=torch.ones(24)), r"missing: blocks.2.norm1.weight.*and 18 more"),
    "nan": (changed(norm__bias=torch.full((24,), torch.nan)), "NaN or infinite values in norm.bias"),
    "integers": (
        changed(norm__bias=torch.ones(24, dtype=torch.int8)),
        "not floating-point tensors: norm.bias",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_this_vit_is_refused_by_name(fault: str, state: State, tmp_path: Path) -> None:
    change, told = REFUSED[fault]
    path = write(tmp_path / "w.safetensors", change(state))
    with pytest.raises(WeightsError, match=told) as caught:
        load_vit(read_checkpoint(path), heads=3)
    assert str(path) in str(caught.value)


def test_another_network_names_a_few_keys_and_how_many(tmp_path: Path) -> None:
    resnet = {f"layer{i}.conv.weight": torch.ones(2, 2) for i in range(40)}
    with pytest.raises(WeightsError) as caught:
        load_vit(read_checkpoint(write(tmp_path / "w.safetensors", resnet)))
    message = str(caught.value)
    assert "cls_token" in message and "layer0.conv.weight" in message and "and 35 more" in message
    assert message.count("layer") == 5 and "\n" not in message


def test_unknown_flax_parts_are_refused_by_name(state: State, tmp_path: Path) -> None:
    arrays = to_flax(state, 3)
    arrays["Transformer/strange/kernel"] = np.ones(3, np.float32)
    del arrays["Transformer/encoderblock_1/MultiHeadDotProductAttention_1/key/bias"]
    with pytest.raises(WeightsError, match="Transformer/strange/kernel"):
        load_vit(read_checkpoint(write(tmp_path / "w.npz", arrays)))
    del arrays["Transformer/strange/kernel"]
    with pytest.raises(
        WeightsError, match="missing: blocks.1.attn.qkv.bias; unexpected: blocks.1.attn.q.bias"
    ):
        load_vit(read_checkpoint(write(tmp_path / "w.npz", arrays)))


@pytest.mark.parametrize("dim, heads", [(192, 3), (384, 6), (768, 12), (1024, 16), (1280, 16)])
def test_heads_follow_from_the_width(dim: int, heads: int) -> None:
    with torch.device("meta"):
        tensors = ViT(ViTConfig(32, 16, dim, 1, heads, 8)).state_dict()
    assert derive_config(Path("x"), tensors).heads == heads


def test_heads_that_nothing_tells_or_that_do_not_divide(state: State, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write(tmp_path / "w.safetensors", state))
    with pytest.raises(WeightsError, match="pass heads="):
        load_vit(checkpoint)
    for heads in (0, 5):
        with pytest.raises(WeightsError, match=f"{heads} attention heads"):
            load_vit(checkpoint, heads=heads)


def test_metadata_wins_over_a_config_and_an_argument_over_both(state: State, tmp_path: Path) -> None:
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


def test_a_config_with_another_pooling_is_refused(state: State, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"global_pool": "avg"}))
    with pytest.raises(WeightsError, match="mean pooling"):
        load_vit(read_checkpoint(write(tmp_path / "w.safetensors", state), config), heads=3)
    config.write_text("[1]")
    with pytest.raises(WeightsError, match="config.json"):
        read_checkpoint(tmp_path / "w.safetensors", config)


def test_half_precision_is_read_as_fp32(state: State, vit: ViT, tmp_path: Path) -> None:
    halves = {name: tensor.half() for name, tensor in state.items()}
    loaded, _ = load_vit(read_checkpoint(write(tmp_path / "w.safetensors", halves)), heads=3)
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}
    assert torch.equal(loaded.norm.bias, vit.norm.bias.half().float())


@pytest.mark.parametrize("size", [0, 2, 18])
def test_image_size_must_be_whole_patches(size: int, state: State, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="multiple of the patch size 4"):
        load_vit(read_checkpoint(write(tmp_path / "w.safetensors", state)), heads=3, image_size=size)


def test_fingerprint_tells_apart_whatever_computes_differently(state: State, tmp_path: Path) -> None:
    def fingerprint(state: State, **options: Any) -> str:
        path = write(tmp_path / "w.safetensors", state)
        return load_vit(read_checkpoint(path), **{"heads": 3} | options)[1]

    first = fingerprint(state)
    assert first == fingerprint(state) and len(first) == 64
    assert first == fingerprint(state | {"head.bias": torch.zeros(7)})
    nudged = state["norm.bias"].clone()
    nudged[0] += 1e-4
    pooled = {
        name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: t
        for name, t in state.items()
    }
    others = [
        fingerprint(state | {"norm.bias": nudged}),
        fingerprint(pooled),
        fingerprint(state, heads=2),
        fingerprint(state, image_size=32),
    ]
    assert len({first, *others}) == 5


def test_weights_do_not_change_when_their_file_does(state: State, vit: ViT, tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", state)
    loaded, _ = load_vit(read_checkpoint(path), heads=3)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded.patch_embed.proj.weight, vit.patch_embed.proj.weight)
