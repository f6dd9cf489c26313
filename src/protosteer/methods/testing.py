"""Toy images, tasks and a backbone on which a method learns within seconds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ArrayImages
from protosteer.data.transforms import Preprocessing
from protosteer.methods.base import TrainingTask
from protosteer.paper.vit import ViT, ViTConfig

GROUPS = (["ant", "bee"], ["cat", "dog", "eel"], ["fox"])


def toy_task(classes: Sequence[str], per_class: int = 8) -> TrainingTask:
    """Create a task of easy images."""
    pixels, labels = toy_images(classes, per_class)
    return TrainingTask(classes[0], list(classes), ArrayImages(pixels), labels)


def toy_backbone(seed: int = 0, pool: str = "token") -> Backbone:
    """Create a random two-layer ViT for 16-px images, whose embeddings suffice to learn from."""
    config = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, heads=3, mlp_dim=48, pool=pool)
    with torch.device("meta"):  # leaves torch's generator alone: another thread may be training
        vit = ViT(config)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, parameter in vit.named_parameters():
        if name.startswith("norm") or ".norm" in name:
            weights[name] = torch.full(parameter.shape, float(name.endswith("weight")))
        else:
            weights[name] = torch.randn(parameter.shape, generator=generator) * 0.2
    vit.load_state_dict(weights, assign=True)
    half = (0.5, 0.5, 0.5)
    return Backbone("tiny", vit, Preprocessing(16, half, half))


def toy_images(classes: Sequence[str], per_class: int = 8, seed: int = 0) -> tuple[Tensor, list[str]]:
    """Draw noisy copies of one random picture per class: uint8 [N, 3, 16, 16] and labels."""
    images: list[Tensor] = []
    labels: list[str] = []
    for name in classes:
        pattern = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
        picture = torch.randint(40, 216, (3, 16, 16), generator=pattern)
        noise = torch.Generator().manual_seed(seed + len(labels))
        copies = picture + torch.randint(-40, 40, (per_class, 3, 16, 16), generator=noise)
        images.append(copies.to(torch.uint8))
        labels += [name] * per_class
    return torch.cat(images), labels
