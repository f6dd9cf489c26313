"""Backbone and images of the golden model files (tests/model/golden), from integer arithmetic alone."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.paper.vit import ViT, ViTConfig

FOLDER = Path(__file__).parent / "model" / "golden"
CLASSES = ["ant", "bee", "cat", "dog", "elk", "fox"]


def numbers(seed: int, *shape: int) -> Tensor:
    """float32 of this shape, in [-1, 1), by an integer hash: no generator of a library has a say."""
    hashed = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(2654435761)
    hashed += np.uint64(seed * 40503 + 12345)
    for shift, factor in [(16, 2246822519), (13, 3266489917), (16, 668265263)]:
        hashed = ((hashed ^ (hashed >> np.uint64(shift))) * np.uint64(factor)) % np.uint64(2**32)
    return torch.from_numpy((hashed.astype(np.int64).reshape(shape) - 2**31) / 2**31).float()


def golden_backbone() -> Backbone:
    vit = ViT(ViTConfig(image_size=8, patch_size=4, dim=12, depth=2, heads=2, mlp_dim=24))
    weights = {}
    for place, (name, tensor) in enumerate(sorted(vit.state_dict().items())):
        drawn = numbers(1000 + place, *tensor.shape)
        weights[name] = 1 + drawn / 8 if "norm" in name and name.endswith("weight") else drawn / 2
    vit.load_state_dict(weights)
    return Backbone("golden", vit, Preprocessing(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))


def picture(seed: int, *shares: tuple[str, float]) -> Tensor:
    """uint8 [3, 8, 8]: the patterns of classes, mixed, with noise."""
    mixed = torch.zeros(3, 8, 8)
    for name, share in shares:
        mixed += share * numbers(CLASSES.index(name), 3, 8, 8)
    return (128 + 48 * (mixed + 1.2 * numbers(100 + seed, 3, 8, 8))).clamp(0, 255).to(torch.uint8)


def pictures(name: str, count: int, first: int = 0) -> Tensor:
    """uint8 [count, 3, 8, 8]: images of one class; `first` tells them from others of it."""
    offset = 1000 * (CLASSES.index(name) + 1) + first
    return torch.stack([picture(offset + i, (name, 1.0)) for i in range(count)])


def task(first: int = 0, **counts: int) -> tuple[Tensor, list[str]]:
    """So many images of each class, and their labels."""
    images = torch.cat([pictures(name, count, first) for name, count in counts.items()])
    return images, [name for name, count in counts.items() for _ in range(count)]


def queries() -> Tensor:
    """uint8 [12, 3, 8, 8]: an image of each class, and one between each two classes."""
    clear = [picture(i, (name, 1.0)) for i, name in enumerate(CLASSES)]
    pairs = zip(CLASSES, CLASSES[1:] + CLASSES[:1], strict=True)
    return torch.stack(clear + [picture(50 + i, (a, 0.5), (b, 0.5)) for i, (a, b) in enumerate(pairs)])
