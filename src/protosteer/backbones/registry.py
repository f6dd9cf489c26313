"""Short names of backbones, their checkpoints, and the preprocessing that usual names imply."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from protosteer.data.transforms import Preprocessing
from protosteer.errors import WeightsError
from protosteer.paper.vit import ViT, ViTConfig

MINI, NANO = "mini", "nano"  # shipped: for photographs; for digits, letters and tests
# Shipped weights that were replaced, by fingerprint: models that were learned with them keep working.
EARLIER = {
    "0c6f55d9ef07899af0495680f990573b1702e5ac9a7f8d28c8f21c7824a6ded4": "mini-v1",
    "3e909b098f9e8b68fc220aafd7263caca50bb02e44faf2dcbaa2ba5ecd059ce1": "mini-v2",
}
AUTO = "auto"  # the best one for the user's images
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
NOT_STATED = "not stated"  # the licence of a file that says nothing about it
BASE = ViTConfig(image_size=224, patch_size=16, dim=768, depth=12, heads=12, mlp_dim=3072)
SMALL = replace(BASE, dim=384, heads=6, mlp_dim=1536)
TINY = replace(BASE, dim=192, heads=3, mlp_dim=768)


@dataclass(frozen=True)
class BackboneInfo:
    """Describe a checkpoint at one image size before it is loaded: one line of `protosteer backbones`."""

    alias: str
    name: str
    licence: str
    config: ViTConfig
    shipped: bool = False  # as NAME.safetensors among the package's assets
    worth_fetching: bool = False  # small enough to download for a trial on a user's images
    url: str | None = None  # None: timm's hub has it
    md5: str = ""  # the first digits, which its authors publish
    path: Path | None = None  # of the weights on this disk

    @property
    def on_disk(self) -> bool:
        """Return True if the weights are on this disk."""
        return self.path is not None

    @property
    def pool(self) -> str:
        """Return how tokens are pooled: "token" or "mean"."""
        return self.config.pool

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return _parameters(self.config)

    @property
    def preprocessing(self) -> Preprocessing:
        """Return the preprocessing of the weights."""
        return preprocessing(self.name, self.path, self.config.image_size, {})

    def check(self, config: ViTConfig, path: Path) -> None:
        """Raise `WeightsError` if a file loaded under this short name has another architecture."""
        known_config = self.config
        if known_config.pool == "mean" and config.pool == "token":
            message = (
                f"{path} has no fc_norm, so it is not the fine-tuned MAE but probably the self-supervised "
                f"one; '{self.alias}' means {self.name}.pth"
            )
            raise WeightsError(message, code="other-architecture", path=path)
        shape = ("dim", "depth", "patch_size", "registers", "layer_scale", "pool")
        if any(getattr(config, part) != getattr(known_config, part) for part in shape):
            message = (
                f"{path} is not {self.name}: width {config.dim}, depth {config.depth}, "
                f"patch {config.patch_size}, {config.registers} registers, {config.pool} pooling; "
                f"give it another name than '{self.alias}'"
            )
            raise WeightsError(message, code="other-architecture", path=path)


@functools.cache
def _parameters(config: ViTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ViT(config).parameters())


# A new checkpoint needs one entry here; a shipped one also its file among the assets. Messages recommend the first that
# is worth fetching.
KNOWN = (
    BackboneInfo(MINI, MINI, "Apache-2.0", replace(TINY, image_size=160), shipped=True),
    BackboneInfo(
        NANO,
        NANO,
        "Apache-2.0",
        ViTConfig(image_size=32, patch_size=8, dim=128, depth=3, heads=4, mlp_dim=512, pool="mean"),
        shipped=True,
    ),
    BackboneInfo("vit-tiny", "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "Apache-2.0", TINY, worth_fetching=True),
    BackboneInfo("vit-small", "vit_small_patch16_224.augreg_in21k_ft_in1k", "Apache-2.0", SMALL, worth_fetching=True),
    BackboneInfo(
        "dinov2-small",
        "vit_small_patch14_reg4_dinov2.lvd142m",  # made for 518 pixels, where it computes 7.5 times as much
        "Apache-2.0",
        replace(SMALL, patch_size=14, registers=4, layer_scale=True, position_for_class=False),
        worth_fetching=True,
    ),
    # The paper's checkpoints.
    BackboneInfo("vit", "vit_base_patch16_224.augreg_in21k_ft_in1k", "Apache-2.0", BASE),
    BackboneInfo("deit", "deit_base_patch16_224.fb_in1k", "Apache-2.0", BASE),
    BackboneInfo("dino", "vit_base_patch16_224.dino", "Apache-2.0", BASE),
    BackboneInfo(
        "mae",
        "mae_finetuned_vit_base",  # fine-tuned with labels; the self-supervised file is another one
        "CC-BY-NC-4.0",
        replace(BASE, pool="mean"),
        url="https://dl.fbaipublicfiles.com/mae/finetune/mae_finetuned_vit_base.pth",
        md5="1b25e9",
    ),
)


def known_weights(name: str) -> BackboneInfo | None:
    """Return the known checkpoint of a short or full name; None if there is none."""
    short_name = name.removeprefix("timm/")
    return next((info for info in KNOWN if short_name in (info.alias, info.name)), None)


def full_name(name: str) -> str:
    """Resolve a short name and the prefix timm/ to the name of a loaded backbone."""
    info = known_weights(name)
    return info.name if info else name.removeprefix("timm/")


def preprocessing(name: str, path: Path | None, image_size: int, metadata: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing of weights: by their `metadata`, else that of the family of their name."""
    values = _family(name, path) | {key: value for key, value in metadata.items() if value is not None}
    if "mean" not in values or "std" not in values:
        message = f"how {name!r} normalises pixels is unknown; pass mean= and std="
        raise WeightsError(message, code="unknown-preprocessing", name=name)
    options = {key: values[key] for key in ("crop", "interpolation") if key in values}
    return Preprocessing(image_size, tuple(values["mean"]), tuple(values["std"]), **options)


def _family(name: str, path: Path | None) -> dict[str, Any]:
    words = re.split(r"[^a-z0-9]+", name.lower())

    def has(*starts: str) -> bool:
        return any(word.startswith(starts) for word in words)

    if name in (MINI, NANO):
        return HALF | {"crop": 1.0}
    if has("dinov2"):
        return IMAGENET | {"crop": 1.0}
    if "mae" in words or has("deit", "dino"):
        # MAE's authors evaluate on 256 -> 224; timm's 0.9 holds for all other files.
        return IMAGENET | {"crop": 0.875 if words[0] == "mae" else 0.9}
    if (words[0] == "vit" and has("augreg", "orig")) or (path is not None and path.suffix.lower() == ".npz"):
        return HALF | {"crop": 0.9}
    return {}
