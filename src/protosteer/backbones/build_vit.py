"""Build a ViT from tensors under timm's names, check it, and compute its fingerprint.

The architecture is derived from the tensors' shapes. What they do not show (heads, image size) comes from the
file's metadata, a config beside it, or an argument. A missing, unknown or misshapen tensor is rejected by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from protosteer.backbones.checkpoint_guards import MAX_BLOCKS, names
from protosteer.backbones.checkpoint_io import Checkpoint
from protosteer.errors import FingerprintMismatchError, WeightsError
from protosteer.paper.vit import ViT, ViTConfig

_ANCHORS = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight")
_VIT_NAME = re.compile(r"(?:cls|reg)_token|pos_embed|(?:patch_embed\.proj|norm|fc_norm)\.\w+|blocks\.\d+\..+")
_MAX_GRID = 64  # patches along a side: attention costs the fourth power
_WIDE_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # so400m, huge, giant, gigantic


def load_vit(
    checkpoint: Checkpoint, heads: int | None = None, image_size: int | None = None, sha256: str | None = None
) -> tuple[ViT, str]:
    """Build the frozen ViT of a checkpoint; return it and its fingerprint, which must be `sha256` if that is given.

    `heads` and `image_size` override the file's metadata; positions are interpolated. Raises `WeightsError`.
    """
    path, tensors, metadata = checkpoint.path, checkpoint.tensors, checkpoint.about
    heads = metadata.get("heads") if heads is None else heads
    image_size = metadata.get("image_size") if image_size is None else image_size
    try:
        config = derive_config(tensors, heads)
        _check_tensors(tensors, config)
        if metadata.get("pool") not in (None, config.pool):
            message = f"its config says {metadata['pool']} pooling, but its norm layer means {config.pool}"
            raise _MisfitError(f"{message}; give the weights that belong to the config")
        tensors, config = _fold_register_positions(tensors, config)
        config = _at_size(config, image_size)
    except _MisfitError as error:
        raise WeightsError(f"{path}: {error}", code=error.code, path=path) from error
    digest = fingerprint(tensors, config)
    if sha256 not in (None, digest):
        message = f"{path} has fingerprint {digest[:12]} at images of {config.image_size} pixels"
        raise FingerprintMismatchError(message, code="other-weights", path=path)
    positions = resample_positions(tensors["pos_embed"], config.grid, config.position_for_class)
    with torch.device("meta"):
        vit = ViT(config)
    vit.load_state_dict(tensors | {"pos_embed": positions}, assign=True)
    return vit.requires_grad_(False).eval(), digest


def derive_config(tensors: Mapping[str, Tensor], heads: int | None = None) -> ViTConfig:
    """Derive the architecture from shapes, at the image size of the position embeddings; see `load_vit`."""
    absent_names = [name for name in _ANCHORS if name not in tensors]
    extra_names = [name for name in tensors if not _VIT_NAME.fullmatch(name)]
    kernel = tensors.get("patch_embed.proj.weight")
    if kernel is not None and (kernel.ndim != 4 or kernel.shape[1] != 3 or len(set(kernel.shape[2:])) > 1):
        extra_names.append(f"patch_embed.proj.weight {list(kernel.shape)}, not [D, 3, p, p]")
    if kernel is None or absent_names or extra_names:
        raise _not_a_vit(missing=absent_names, unexpected=extra_names)
    dim, patch = kernel.shape[0], kernel.shape[2]
    registers = _registers(tensors)
    grid, positions = _grid(tensors["pos_embed"], registers)
    hidden = tensors.get("blocks.0.mlp.fc1.bias")
    return ViTConfig(
        image_size=grid * patch,
        patch_size=patch,
        dim=dim,
        depth=_depth(tensors),
        heads=_heads(dim, heads),
        mlp_dim=4 * dim if hidden is None else hidden.numel(),
        registers=registers,
        layer_scale="blocks.0.ls1.gamma" in tensors,
        pool="mean" if "fc_norm.weight" in tensors else "token",
        position_for_class=positions > grid**2,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
    )


def fingerprint(tensors: Mapping[str, Tensor], config: ViTConfig) -> str:
    """Hash everything that determines embeddings, with sha256.

    Position embeddings are hashed as they are in the file, together with the image size: interpolated ones may
    differ in the last bit between two machines, which must agree on the fingerprint.
    """
    hidden = {"heads": config.heads, "image_size": config.image_size}  # shapes do not show them
    digest = hashlib.sha256(json.dumps(hidden, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().numpy().data)
    return digest.hexdigest()


def _depth(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of blocks; raise if their numbers have a gap."""
    numbers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    expected_numbers = {str(number) for number in range(min(len(numbers), MAX_BLOCKS))}
    if numbers != expected_numbers:
        raise _MisfitError(
            f"blocks must be numbered from 0 on without a gap, {MAX_BLOCKS} at most; of {len(numbers)} blocks, "
            f"unexpected: {names(sorted(numbers - expected_numbers))}"
        )
    return len(numbers)


def _registers(tensors: Mapping[str, Tensor]) -> int:
    if "reg_token" not in tensors:
        return 0
    if (token := tensors["reg_token"]).ndim != 3:
        raise _not_a_vit(wrong_shape=[f"reg_token {list(token.shape)}, not [1, R, D]"])
    return token.shape[1]


def _grid(pos_embed: Tensor, registers: int) -> tuple[int, int]:
    """Return the number of patches along a side, and of all positions."""
    if pos_embed.ndim == 3:
        count = pos_embed.shape[1]
        for prefix_length in (1, 0, 1 + registers):  # with the class token; patches alone; with registers too
            if count > prefix_length and math.isqrt(count - prefix_length) ** 2 == count - prefix_length:
                return math.isqrt(count - prefix_length), count
    raise _MisfitError(f"pos_embed {list(pos_embed.shape)} is not that of a square grid of patches")


def _heads(dim: int, heads: int | None) -> int:
    if heads is None and dim % 64 == 0:
        heads = _WIDE_HEADS.get(dim, dim // 64)
    if heads is None:
        raise _MisfitError(f"the number of attention heads of width {dim} is unknown; pass heads=", "unknown-heads")
    if heads < 1 or dim % heads:
        raise _MisfitError(f"{heads} attention heads do not divide width {dim}; pass another heads=", "unknown-heads")
    return heads


def _at_size(config: ViTConfig, image_size: int | None) -> ViTConfig:
    size = config.image_size if image_size is None else image_size
    if size < config.patch_size or size % config.patch_size:
        nearest = max(1, round(size / config.patch_size)) * config.patch_size
        message = f"image size {size} is not a multiple of the patch size {config.patch_size}"
        raise _MisfitError(f"{message}; pass image_size={nearest}", "bad-image-size")
    sized = replace(config, image_size=size)
    if sized.grid > max(_MAX_GRID, config.grid):
        patches = f"{sized.grid} x {sized.grid} patches, more than {_MAX_GRID} x {_MAX_GRID}"
        raise _MisfitError(f"images of {size} pixels make {patches}; pass a smaller image_size=", "bad-image-size")
    return sized


def _fold_register_positions(tensors: dict[str, Tensor], config: ViTConfig) -> tuple[dict[str, Tensor], ViTConfig]:
    """Add the positions of class and register tokens to these tokens; the sums stay the same."""
    prefix_length = tensors["pos_embed"].shape[1] - config.patches
    if prefix_length <= 1:
        return tensors, config
    prefix, patches = tensors["pos_embed"][:, :prefix_length], tensors["pos_embed"][:, prefix_length:]
    folded = {
        "cls_token": tensors["cls_token"] + prefix[:, :1],
        "reg_token": tensors["reg_token"] + prefix[:, 1:],
        "pos_embed": patches.contiguous(),
    }
    return tensors | folded, replace(config, position_for_class=False)


def _check_tensors(tensors: Mapping[str, Tensor], config: ViTConfig) -> None:
    """Check that the tensors are exactly this ViT's parameters: names, shapes, finite values."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in ViT(config).state_dict().items()}
    positions = tensors["pos_embed"].shape[1]  # a count that _grid accepted, registers' positions included
    shapes["pos_embed"] = torch.Size((1, positions, config.dim))
    absent_names = [name for name in shapes if name not in tensors]
    extra_names = [name for name in tensors if name not in shapes]
    shape_faults = [
        f"{name} {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if absent_names or extra_names or shape_faults:
        raise _not_a_vit(missing=absent_names, unexpected=extra_names, wrong_shape=shape_faults)
    invalid_names = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if invalid_names:
        raise _MisfitError(f"NaN or infinite values in {names(invalid_names)}; fetch it again", "damaged-weights")


def _not_a_vit(**groups: list[str]) -> _MisfitError:
    faults = [f"{kind.replace('_', ' ')}: {names(group)}" for kind, group in groups.items() if group]
    return _MisfitError("it does not hold a plain ViT with a class token; " + "; ".join(faults))


class _MisfitError(Exception):
    """The tensors are not those of a usable ViT; `load_vit` adds the file's path."""

    def __init__(self, message: str, code: str = "other-architecture"):
        super().__init__(message)
        self.code = code


def resample_positions(pos_embed: Tensor, grid: int, has_class: bool) -> Tensor:
    """Resize position embeddings [1, (1 +) n², D] to `grid` x `grid` patches, bicubic and antialiased."""
    prefix, patches = pos_embed[:, : int(has_class)], pos_embed[:, int(has_class) :]
    old_grid = math.isqrt(patches.shape[1])
    if old_grid == grid:
        return pos_embed
    square = patches.float().reshape(1, old_grid, old_grid, -1).permute(0, 3, 1, 2)
    square = interpolate(square, size=(grid, grid), mode="bicubic", antialias=True)
    patches = square.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed.dtype)
    return torch.cat([prefix, patches], dim=1)


def multiply_adds(config: ViTConfig) -> int:
    """Count the multiply-add operations for one image: all tokens of all layers, without a prompt."""
    dim, tokens = config.dim, 1 + config.registers + config.patches
    layer = tokens * (4 * dim**2 + 2 * dim * config.mlp_dim) + 2 * tokens**2 * dim
    return config.patches * 3 * config.patch_size**2 * dim + config.depth * layer
