"""What the measurements are made on: backbones without a weights file, images, memories nobody had to learn.

Speed does not depend on what the weights are, so random ones stand for trained ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import IMAGENET, Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.method.memory import ClassRecord, Memory, TaskRecord
from protosteer.method.prototypes import Centroids
from protosteer.method.vit import ViT, ViTConfig

LATE, LATE_NANO = (4, 7, 10), (2,)  # layers that late prompts begin in

_PROBES = 16  # images that tell what a backbone's embeddings look like
_COARSE = 4  # colour fields along one side of an image


def vit_tiny(depth: int = 12) -> Backbone:
    """A random ViT-Ti/16 at 224 px: the shape of DeiT-Tiny."""
    config = ViTConfig(image_size=224, patch_size=16, dim=192, depth=depth, heads=3, mlp_dim=768)
    return _random("random ViT-Ti/16", config)


def small(depth: int = 3, pool: str = "token") -> Backbone:
    """A random ViT that costs next to nothing, for tests."""
    config = ViTConfig(image_size=16, patch_size=4, dim=24, depth=depth, heads=3, mlp_dim=48, pool=pool)
    return _random("random small ViT", config)


def _random(name: str, config: ViTConfig) -> Backbone:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vit = ViT(config)
        for parameter in vit.parameters():
            nn.init.normal_(parameter, std=0.02)
        for module in vit.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
    return Backbone(name, vit, Preprocessing(config.image_size, IMAGENET["mean"], IMAGENET["std"]))


def pictures(backbone: Backbone, count: int, seed: int = 0) -> Tensor:
    """uint8 [count, 3, s, s]: fields of random colours; plain noise looks much alike to a ViT."""
    generator = torch.Generator().manual_seed(seed)
    fields = torch.randint(0, 256, (count, 3, _COARSE, _COARSE), generator=generator, dtype=torch.uint8)
    return F.interpolate(fields, size=backbone.image_size, mode="nearest")


def memory_of(
    backbone: Backbone,
    tasks: int,
    classes_per_task: int,
    centroids: int,
    prompt_from_layer: int = 1,
    seed: int = 0,
) -> Memory:
    """Random records whose centroids are spread as the backbone's embeddings are.

    So different images retrieve different tasks. The centroids do not depend on the prompts' layers.
    """
    embeddings = backbone.embed_pixels(pictures(backbone, _PROBES, seed=1))
    generator = torch.Generator().manual_seed(seed)
    shape = (tasks, classes_per_task, centroids, backbone.dim)
    keys, values = (
        embeddings.mean(dim=0) + embeddings.std(dim=0) * torch.randn(shape, generator=generator)
        for _ in range(2)
    )
    prompts = torch.randn(tasks, *backbone.prompt_shape(1, from_layer=prompt_from_layer), generator=generator)
    return Memory(
        TaskRecord(
            f"task-{t}",
            tuple(class_record(f"class-{t}-{k}", keys[t, k], values[t, k]) for k in range(classes_per_task)),
            prompts[t],
        )
        for t in range(tasks)
    )


def class_record(name: str, keys: Tensor, values: Tensor) -> ClassRecord:
    """A class of centroids [c, D] that stand for one image each."""
    counts = torch.ones(len(values), dtype=torch.int64)
    deviations = torch.zeros(1, 1).expand_as(values)  # takes no memory
    return ClassRecord(name, keys, Centroids(values, deviations, counts))
