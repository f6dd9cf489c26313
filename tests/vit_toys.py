"""A random ViT of any depth that costs next to nothing."""

import torch

from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.paper.vit import ViT, ViTConfig


def small(depth: int = 3, pool: str = "token") -> Backbone:
    config = ViTConfig(image_size=16, patch_size=4, dim=24, depth=depth, heads=3, mlp_dim=48, pool=pool)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Backbone("small", ViT(config), Preprocessing(16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
