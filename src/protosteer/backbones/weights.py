"""Weight files of others -> tensors under timm's names, checked, and the ViT they belong to.

Three containers are read: safetensors, PyTorch's `.pth` (unpickled with nothing but tensors and plain
data allowed) and Google's `.npz`. None of them can run code. The architecture is read off the tensors'
shapes; what they cannot tell (heads, preprocessing) comes from metadata in the file or a config.json
beside it. Every tensor must have its place: a missing, unknown or misshapen one is refused by name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from protosteer.errors import WeightsError
from protosteer.method.vit import ViT, ViTConfig, resample_positions

METADATA_KEY = "protosteer"  # JSON in the header of our own safetensors files

_CONTAINERS = ("model", "state_dict", "teacher")
_WRAPPERS = re.compile(r"^(?:module\.|backbone\.)+")
# Parts that embeddings do not need: classifiers, projection heads, the token of masked-image training.
_DROPPED = re.compile(r"^(?:head|head_dist|dino_head|ibot_head|pre_logits)[./]|^mask_token$")
_RENAMED = {"register_tokens": "reg_token"}
_ANCHORS = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight")
_VIT_NAME = re.compile(r"(?:cls|reg)_token|pos_embed|(?:patch_embed\.proj|norm|fc_norm)\.\w+|blocks\.\d+\..+")
_WIDE_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # so400m, huge, giant, gigantic: heads wider than 64


@dataclass(frozen=True)
class Checkpoint:
    """Tensors under timm's names, and what the file says about itself.

    `about` may hold heads, image_size, mean, std, crop, interpolation, pool, name and licence.
    """

    path: Path
    tensors: dict[str, Tensor]
    about: dict[str, Any]


def read_checkpoint(path: Path, config: Path | None = None) -> Checkpoint:
    """Read a weights file; `config`, in the form of the hub's config.json, tells what the file does not."""
    if not path.is_file():
        raise WeightsError(f"no weights file at {path}; check the path")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise WeightsError(f"{path}: unknown kind of weights file; give one of {', '.join(_READERS)}")
    tensors, about = reader(path)
    if config is not None and config.is_file():
        about = _read_config(config) | about
    return Checkpoint(path, _canonical(path, tensors), about)


def read_metadata(header: Mapping[str, str] | None) -> dict[str, Any]:
    """What one of our own safetensors files says about itself; of any other, nothing."""
    about: dict[str, Any] = json.loads((header or {}).get(METADATA_KEY, "{}"))
    return about


def load_vit(
    checkpoint: Checkpoint, heads: int | None = None, image_size: int | None = None
) -> tuple[ViT, str]:
    """The frozen ViT of a checkpoint for images of `image_size`, and its fingerprint."""
    path, tensors, about = checkpoint.path, checkpoint.tensors, checkpoint.about
    heads = about.get("heads") if heads is None else heads
    image_size = about.get("image_size") if image_size is None else image_size
    config = derive_config(path, tensors, heads)
    _check_tensors(path, tensors, config)
    if about.get("pool") not in (None, config.pool):
        raise WeightsError(
            f"{path}: its config says {about['pool']} pooling, but its norm layer means {config.pool}; "
            "give the weights that belong to the config"
        )
    tensors, config = _fold_register_positions(tensors, config)
    config = _at_size(path, config, image_size)
    digest = fingerprint(tensors, config)
    positions = resample_positions(tensors["pos_embed"], config.grid, config.position_for_class)
    with torch.device("meta"):
        vit = ViT(config)
    vit.load_state_dict(tensors | {"pos_embed": positions}, assign=True)
    return vit.requires_grad_(False).eval(), digest


def derive_config(path: Path, tensors: Mapping[str, Tensor], heads: int | None = None) -> ViTConfig:
    """The architecture, at the image size that the position embeddings were made for."""
    missing = [name for name in _ANCHORS if name not in tensors]
    strange = [name for name in tensors if not _VIT_NAME.fullmatch(name)]
    kernel = tensors.get("patch_embed.proj.weight")
    if kernel is not None and (kernel.ndim != 4 or kernel.shape[1] != 3 or len(set(kernel.shape[2:])) > 1):
        strange.append(f"patch_embed.proj.weight {list(kernel.shape)}, not [D, 3, p, p]")
    if kernel is None or missing or strange:
        raise WeightsError(_refusal(path, missing=missing, unexpected=strange))
    dim, patch = kernel.shape[0], kernel.shape[2]
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    grid, positions = _grid(path, tensors["pos_embed"], registers)
    hidden = tensors.get("blocks.0.mlp.fc1.bias")
    return ViTConfig(
        image_size=grid * patch,
        patch_size=patch,
        dim=dim,
        depth=1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")),
        heads=_heads(path, dim, heads),
        mlp_dim=4 * dim if hidden is None else len(hidden),
        registers=registers,
        layer_scale="blocks.0.ls1.gamma" in tensors,
        pool="mean" if "fc_norm.weight" in tensors else "token",
        position_for_class=positions > grid**2,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
    )


def fingerprint(tensors: Mapping[str, Tensor], config: ViTConfig) -> str:
    """sha256 of what computes the embeddings.

    Position embeddings count as they stand in the file, and the image size beside them: interpolated
    ones may differ in the last bit between two machines, which must still agree on the fingerprint.
    """
    told = {"heads": config.heads, "image_size": config.image_size}  # the tensors do not show these
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().numpy().data)
    return digest.hexdigest()


def _grid(path: Path, pos_embed: Tensor, registers: int) -> tuple[int, int]:
    """Patches along a side, and how many positions there are in all."""
    if pos_embed.ndim == 3:
        count = pos_embed.shape[1]
        for extra in (1, 0, 1 + registers):  # with the class token; patches alone; with registers too
            if count > extra and math.isqrt(count - extra) ** 2 == count - extra:
                return math.isqrt(count - extra), count
    raise WeightsError(f"{path}: pos_embed {list(pos_embed.shape)} is not that of a square grid of patches")


def _heads(path: Path, dim: int, heads: int | None) -> int:
    if heads is None and dim % 64 == 0:
        heads = _WIDE_HEADS.get(dim, dim // 64)
    if heads is None:
        raise WeightsError(f"{path}: nothing tells the number of attention heads of width {dim}; pass heads=")
    if heads < 1 or dim % heads:
        raise WeightsError(f"{path}: {heads} attention heads do not divide width {dim}; pass another heads=")
    return heads


def _at_size(path: Path, config: ViTConfig, image_size: int | None) -> ViTConfig:
    size = config.image_size if image_size is None else image_size
    if size < config.patch_size or size % config.patch_size:
        raise WeightsError(
            f"{path}: image size {size} is not a multiple of the patch size {config.patch_size}; "
            f"pass image_size={max(1, round(size / config.patch_size)) * config.patch_size}"
        )
    return replace(config, image_size=size)


def _fold_register_positions(
    tensors: dict[str, Tensor], config: ViTConfig
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Where registers have positions as well, all special tokens absorb theirs: the sums are the same."""
    extra = tensors["pos_embed"].shape[1] - config.patches
    if extra <= 1:
        return tensors, config
    prefix, patches = tensors["pos_embed"][:, :extra], tensors["pos_embed"][:, extra:]
    folded = {
        "cls_token": tensors["cls_token"] + prefix[:, :1],
        "reg_token": tensors["reg_token"] + prefix[:, 1:],
        "pos_embed": patches.contiguous(),
    }
    return tensors | folded, replace(config, position_for_class=False)


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], config: ViTConfig) -> None:
    """Exactly the parameters of this ViT: none missing, none left over, right shapes, finite floats."""
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in ViT(config).state_dict().items()}
    positions = tensors["pos_embed"].shape[1]  # _grid has accepted the count, registers' positions included
    wanted["pos_embed"] = torch.Size((1, positions, config.dim))
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    misshapen = [
        f"{name} {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if missing or unexpected or misshapen:
        raise WeightsError(_refusal(path, missing=missing, unexpected=unexpected, wrong_shape=misshapen))
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise WeightsError(f"{path}: NaN or infinite values in {_some(broken)}; the file is damaged")


def _refusal(path: Path, **groups: list[str]) -> str:
    told = [f"{kind.replace('_', ' ')}: {_some(names)}" for kind, names in groups.items() if names]
    return f"{path} does not hold a plain ViT with a class token; " + "; ".join(told)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 5} more ({len(listed)} in all)" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + more


def _canonical(path: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """timm's names, fp32, heads left out. Copies: the weights must not change when the file does."""
    named = {_WRAPPERS.sub("", name): value for name, value in tensors.items()}
    kept = {_RENAMED.get(name, name): value for name, value in named.items() if not _DROPPED.match(name)}
    strange = [n for n, v in kept.items() if not isinstance(v, Tensor) or not v.is_floating_point()]
    if strange:
        raise WeightsError(f"{path}: not floating-point tensors: {_some(strange)}; give plain weights")
    return {name: value.detach().to(torch.float32, copy=True).contiguous() for name, value in kept.items()}


# Readers: path -> (tensors as they stand in the file, what the file says about itself)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = read_metadata(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path}: damaged safetensors file ({_brief(error)}); fetch it again") from error
    return tensors, about


def _read_torch(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Some authors saved their command-line arguments beside the weights: a Namespace is plain data."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise WeightsError(
            f"{path}: damaged, or it holds more than weights, which could run code when read; "
            f"save its state dict as safetensors ({_brief(error)})"
        ) from error
    for _ in range(2):  # DINO's training files hold the teacher next to the student, at the top level
        inner = next((key for key in _CONTAINERS if isinstance(content, dict) and key in content), None)
        content = content if inner is None else content[inner]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise WeightsError(f"{path}: no state dict at its top level or under {', '.join(_CONTAINERS)}")
    return content, {}


def _brief(error: Exception) -> str:
    """The first sentence: torch's explanations are many lines long."""
    return re.split(r"\n|\. ", str(error).strip(), maxsplit=1)[0][:120] or type(error).__name__


def _read_npz(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise WeightsError(f"{path}: damaged npz file ({_brief(error)}); fetch it again") from error
    return _from_flax(arrays)


_FLAX = {
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
_FLAX_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/(.+)")


def _from_flax(arrays: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flax modules under timm's names; a name that has none stays as it is, to be refused later."""
    root = next((name for name in arrays if name.endswith("embedding/kernel")), "embedding/kernel")
    prefix = root.removesuffix("embedding/kernel")  # "opt/target/", "params/": an optimiser may stand beside
    inside = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    inside = {n: a for n, a in inside.items() if not _DROPPED.match(n)}
    query = next((a for n, a in inside.items() if n.endswith("/query/kernel") and a.ndim >= 3), None)
    about = {} if query is None else {"heads": query.shape[-2]}  # [(depth,) D, heads, D / heads]
    tensors: dict[str, Tensor] = {}
    for name, array in _unstacked(inside).items():
        timm_name = _from_flax_name(name)
        tensors[timm_name] = _from_flax_layout(timm_name, array)
    return _join_qkv(tensors), about


def _unstacked(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some files keep all blocks in one array with a leading depth axis."""
    stack = "Transformer/encoderblock/"
    return {
        name.replace(stack, f"Transformer/encoderblock_{i}/"): part
        for name, array in arrays.items()
        for i, part in enumerate(array if name.startswith(stack) else [array])
    }


def _from_flax_name(name: str) -> str:
    block = _FLAX_BLOCK.fullmatch(name)
    start, rest = (f"blocks.{block[1]}.", block[2]) if block else ("", name)
    rest = re.sub(r"(MlpBlock|MultiHeadDotProductAttention)_\d", r"\1", rest)
    if rest in _FLAX:
        return start + _FLAX[rest]
    module, _, leaf = rest.rpartition("/")
    suffix = {"kernel": ".weight", "scale": ".weight", "bias": ".bias"}.get(leaf)
    return name if suffix is None or module not in _FLAX else start + _FLAX[module] + suffix


def _from_flax_layout(name: str, array: Tensor) -> Tensor:
    """Flax keeps inputs before outputs, and heads as an axis of their own."""
    if name == "patch_embed.proj.weight" and array.ndim == 4:
        return array.permute(3, 2, 0, 1)  # [p, p, 3, D] -> [D, 3, p, p]
    if name.endswith("attn.proj.weight") and array.ndim == 3:
        return array.flatten(0, 1).T  # [heads, D / heads, D] -> [D, D]
    if name.startswith("blocks.") and name.endswith(".weight") and array.ndim >= 2:
        return array.flatten(1).T  # [D, out] or [D, heads, D / heads] -> [out, D]
    return array.flatten() if re.search(r"attn\.[qkv]\.bias$", name) else array


def _join_qkv(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """timm stacks the three projections; an incomplete triple stays apart, to be refused by name."""
    joined = dict(tensors)
    for name in tensors:
        parts = [name.replace("attn.q.", f"attn.{part}.") for part in "qkv"]
        if "attn.q." in name and all(part in tensors for part in parts):
            joined[name.replace("attn.q.", "attn.qkv.")] = torch.cat([joined.pop(part) for part in parts])
    return joined


_READERS = {
    ".safetensors": _read_safetensors,
    ".pth": _read_torch,
    ".pt": _read_torch,
    ".npz": _read_npz,
}


def _read_config(path: Path) -> dict[str, Any]:
    """The hub's config.json for a timm model; of any other config, nothing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        trained = content.get("pretrained_cfg", content)
        size = trained.get("input_size")
        about = {
            "mean": trained.get("mean"),
            "std": trained.get("std"),
            "crop": trained.get("crop_pct"),
            "interpolation": trained.get("interpolation"),
            "image_size": size[-1] if size else None,
            "heads": content.get("model_args", {}).get("num_heads"),
            "pool": {"token": "token", "avg": "mean"}.get(content.get("global_pool")),
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise WeightsError(f"{path}: not a model's config ({_brief(error)}); mend or remove it") from error
    return {key: value for key, value in about.items() if value is not None}
