"""Convert Google's names and layout of a ViT's arrays to timm's."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from protosteer.backbones.checkpoint_guards import MAX_BLOCKS

_MODULES = {
    "cls": "cls_token",
    "embedding": "patch_embed.proj",
    "pos_embedding": "pos_embed",
    "Transformer/posembed_input/pos_embedding": "pos_embed",
    "Transformer/encoder_norm": "norm",
    "LayerNorm_0": "norm1",
    "LayerNorm_1": "norm2",
    "LayerNorm_2": "norm2",  # Google's first releases number the parts of a block through, later ones by kind
    "MlpBlock/Dense_0": "mlp.fc1",
    "MlpBlock/Dense_1": "mlp.fc2",
    "MultiHeadDotProductAttention/query": "attn.q",
    "MultiHeadDotProductAttention/key": "attn.k",
    "MultiHeadDotProductAttention/value": "attn.v",
    "MultiHeadDotProductAttention/out": "attn.proj",
}
_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/(.+)")


def from_flax(arrays: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rename Flax arrays to timm's names; return tensors and metadata. Unknown names stay, and are rejected later."""
    root = next((name for name in arrays if name.endswith("embedding/kernel")), "embedding/kernel")
    prefix = root.removesuffix("embedding/kernel")  # "opt/target/", "params/": the file may hold an optimiser too
    model_arrays = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    query = next((a for n, a in model_arrays.items() if n.endswith("/query/kernel") and a.ndim >= 3), None)
    metadata = {} if query is None else {"heads": query.shape[-2]}  # [(depth,) D, heads, D / heads]
    tensors: dict[str, Tensor] = {}
    for name, array in _unstack(model_arrays).items():
        timm_name = _timm_name(name)
        tensors[timm_name] = _timm_layout(timm_name, array)
    return _join_qkv(tensors), metadata


def _unstack(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split arrays that hold all blocks along a leading depth axis."""
    stack = "Transformer/encoderblock/"
    if any(name.startswith(stack) and len(array) > MAX_BLOCKS for name, array in arrays.items()):
        raise ValueError(f"more than {MAX_BLOCKS} blocks")
    return {
        name.replace(stack, f"Transformer/encoderblock_{i}/"): part
        for name, array in arrays.items()
        for i, part in enumerate(array if name.startswith(stack) else [array])
    }


def _timm_name(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    start, path = (f"blocks.{block[1]}.", block[2]) if block else ("", name)
    path = re.sub(r"(MlpBlock|MultiHeadDotProductAttention)_\d", r"\1", path)
    if path in _MODULES:
        return start + _MODULES[path]
    module, _, leaf = path.rpartition("/")
    suffix = {"kernel": ".weight", "scale": ".weight", "bias": ".bias"}.get(leaf)
    return name if suffix is None or module not in _MODULES else start + _MODULES[module] + suffix


def _timm_layout(name: str, array: Tensor) -> Tensor:
    """Transpose to outputs before inputs, and merge the axis of heads."""
    if name == "patch_embed.proj.weight" and array.ndim == 4:
        return array.permute(3, 2, 0, 1)  # [p, p, 3, D] -> [D, 3, p, p]
    if name.endswith("attn.proj.weight") and array.ndim == 3:
        return array.flatten(0, 1).T  # [heads, D / heads, D] -> [D, D]
    if name.startswith("blocks.") and name.endswith(".weight") and array.ndim >= 2:
        return array.flatten(1).T  # [D, out] or [D, heads, D / heads] -> [out, D]
    return array.flatten() if re.search(r"attn\.[qkv]\.bias$", name) else array


def _join_qkv(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Stack query, key and value as timm does; an incomplete triple stays, and is rejected by name later."""
    result = dict(tensors)
    for name in tensors:
        parts = [name.replace("attn.q.", f"attn.{part}.") for part in "qkv"]
        if "attn.q." in name and all(part in tensors for part in parts):
            result[name.replace("attn.q.", "attn.qkv.")] = torch.cat([result.pop(part) for part in parts])
    return result
