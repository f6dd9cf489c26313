"""Names of backbones: short ones, the paper's checkpoints, the preprocessing that usual names stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protosteer.data.transforms import Preprocessing
from protosteer.errors import WeightsError
from protosteer.method.vit import ViTConfig

NANO = "nano"
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@dataclass(frozen=True)
class BackboneInfo:
    """A backbone that has a short name: one line of `protosteer backbones`."""

    alias: str
    name: str
    licence: str
    pool: str = "token"
    parameters: int = 85_798_656  # a ViT-B/16 for images of 224 pixels, as all of the paper's are
    image_size: int = 224
    url: str | None = None  # None: timm's hub has it
    md5: str = ""  # the digits that its authors publish
    path: Path | None = None  # where `list_backbones` has found the weights on this disk

    @property
    def on_disk(self) -> bool:
        return self.path is not None

    @property
    def preprocessing(self) -> Preprocessing:
        return preprocessing(self.name, self.path, self.image_size, {})

    def check(self, config: ViTConfig, path: Path) -> None:
        """A short name means one checkpoint; a file of another architecture must not pass under it."""
        if self.pool == "mean" and config.pool == "token":
            raise WeightsError(
                f"{path} has no fc_norm, so it is not the fine-tuned MAE but probably the self-supervised "
                f"one; '{self.alias}' means {self.name}.pth"
            )
        if (config.dim, config.depth, config.patch_size, config.pool) != (768, 12, 16, self.pool):
            raise WeightsError(
                f"{path} is not {self.name}: width {config.dim}, depth {config.depth}, "
                f"patch {config.patch_size}, {config.pool} pooling; give it another name than '{self.alias}'"
            )


PAPER_WEIGHTS = (
    BackboneInfo("vit", "vit_base_patch16_224.augreg_in21k_ft_in1k", "Apache-2.0"),
    BackboneInfo("deit", "deit_base_patch16_224.fb_in1k", "Apache-2.0"),
    BackboneInfo("dino", "vit_base_patch16_224.dino", "Apache-2.0"),
    BackboneInfo(
        "mae",
        "mae_finetuned_vit_base",  # fine-tuned with labels; the self-supervised file is another one
        "CC-BY-NC-4.0",
        pool="mean",
        url="https://dl.fbaipublicfiles.com/mae/finetune/mae_finetuned_vit_base.pth",
        md5="1b25e9",
    ),
)
KNOWN = (BackboneInfo(NANO, NANO, "Apache-2.0", "mean", 622_080, 32), *PAPER_WEIGHTS)


def paper_weights(name: str) -> BackboneInfo | None:
    plain = name.removeprefix("timm/")
    return next((paper for paper in PAPER_WEIGHTS if plain in (paper.alias, paper.name)), None)


def full_name(name: str) -> str:
    """What a backbone is called once it is loaded: short names and the prefix timm/ are resolved."""
    paper = paper_weights(name)
    return paper.name if paper else name.removeprefix("timm/")


def preprocessing(name: str, path: Path | None, image_size: int, told: Mapping[str, Any]) -> Preprocessing:
    """As `told`; where that is silent, as the family of weights is known for from its usual name."""
    known = _family(name, path) | {key: value for key, value in told.items() if value is not None}
    if "mean" not in known or "std" not in known:
        raise WeightsError(f"nothing tells how {name!r} normalises its pixels; pass mean= and std=")
    options = {key: known[key] for key in ("crop", "interpolation") if key in known}
    return Preprocessing(image_size, tuple(known["mean"]), tuple(known["std"]), **options)


def _family(name: str, path: Path | None) -> dict[str, Any]:
    words = re.split(r"[^a-z0-9]+", name.lower())

    def has(*starts: str) -> bool:
        return any(word.startswith(starts) for word in words)

    if name == NANO:
        return HALF | {"crop": 1.0}
    if has("dinov2"):
        return IMAGENET | {"crop": 1.0}
    if "mae" in words or has("deit", "dino"):
        # MAE's authors evaluate on 256 -> 224; timm's 0.9 stands for all other files.
        return IMAGENET | {"crop": 0.875 if words[0] == "mae" else 0.9}
    if (words[0] == "vit" and has("augreg", "orig")) or (path is not None and path.suffix.lower() == ".npz"):
        return HALF | {"crop": 0.9}
    return {}
