"""Weight files for tests, in the formats of others, and a machine without other weights or a network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from safetensors.torch import save_file
from torch import Tensor

from conftest import tiny_backbone
from protosteer.backbones import Backbone
from protosteer.backbones.checkpoint_io import METADATA_KEY
from protosteer.paper.vit import ViT, ViTConfig
from timm_oracle import randomise

StateDict = dict[str, Tensor]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
OWN = {
    "heads": 3,
    "image_size": 16,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "crop": 0.5,
    "interpolation": "bilinear",
    "name": "small",
    "licence": "Apache-2.0",
}


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights on disk but a test's own, and no network."""

    def offline(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no network\nin tests")

    def unreachable(*args: Any, **options: Any) -> Any:
        raise requests.ConnectionError("no network\nin tests")

    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    monkeypatch.setattr("requests.get", unreachable)


def tiny_weights(path: Path, about: dict[str, Any] | None = None, pool: str = "token") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = None if about is None else {METADATA_KEY: json.dumps(about)}
    save_file(tiny_backbone(pool=pool).vit.state_dict(), path, metadata=metadata)
    return path


def statistics(backbone: Backbone) -> tuple[Sequence[float], Sequence[float]]:
    return backbone.preprocessing.mean, backbone.preprocessing.std


def hub_config(crop: float = 0.95) -> str:
    trained = {"mean": HALF[0], "std": HALF[1], "crop_pct": crop, "interpolation": "bilinear"}
    trained |= {"input_size": [3, 16, 16]}
    return json.dumps({"global_pool": "token", "model_args": {"num_heads": 3}, "pretrained_cfg": trained})


def to_flax(
    state: StateDict, heads: int, late: bool = False, stacked: bool = False, prefix: str = ""
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
        block |= {f"{at}/kernel": b["attn.proj.weight"].T.reshape(heads, -1, dim), f"{at}/bias": b["attn.proj.bias"]}
        for j in range(2):
            at = f"MlpBlock_{mlp}/Dense_{j}"
            block |= {f"{at}/kernel": b[f"mlp.fc{j + 1}.weight"].T, f"{at}/bias": b[f"mlp.fc{j + 1}.bias"]}
        blocks.append(block)
    if stacked:
        flax |= {f"Transformer/encoderblock/{k}": np.stack([b[k] for b in blocks]) for k in blocks[0]}
    else:
        flax |= {f"Transformer/encoderblock_{i}/{k}": b[k] for i, b in enumerate(blocks) for k in b}
    return {prefix + name: array for name, array in flax.items()}


def write_weights(path: Path, content: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    else:
        torch.save(content, path)
    return path


def random_vit(**options: Any) -> ViT:
    shape = {"image_size": 16, "patch_size": 4, "dim": 24, "depth": 2, "heads": 3, "mlp_dim": 40}
    vit = ViT(ViTConfig(**shape | options))
    randomise(vit)
    return vit


def published(vit: ViT) -> StateDict:
    """Its tensors with a classifier."""
    return vit.state_dict() | {"head.weight": torch.randn(7, 24), "head.bias": torch.randn(7)}
