"""One training step of the prompted backbone: the concatenating forward against ours.

The reference does what prompt code commonly does: it concatenates the prompt to the tokens in every layer and
computes the whole last layer. Both sides run in float32 on the same random ViT-Ti/16 at 224 px and include the
backward pass to the prompt; augmentation, neck and loss, which are the same for both, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from protosteer.vit import ViT, ViTConfig

TARGET = 1.0
BATCH = 16


def concatenating(vit: ViT, images: Tensor, prompt: Tensor) -> Tensor:
    """Deep prompts as tokens: put in before every layer, cut out after it."""
    x = vit.embed_patches(images)
    length = prompt.shape[1]
    for block, tokens in zip(vit.blocks, prompt, strict=True):
        x = block(torch.cat([x[:, :1], tokens.expand(len(x), -1, -1), x[:, 1:]], dim=1))
        x = torch.cat([x[:, :1], x[:, 1 + length :]], dim=1)
    return vit.norm(x)[:, 0]


def run(repeats: int = 5) -> dict[str, float]:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(image_size=224, patch_size=16, dim=192, depth=12, heads=3, mlp_dim=768))
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.02)
    images, readout = torch.randn(BATCH, 3, 224, 224), torch.randn(192)
    prompt = nn.Parameter(torch.randn(12, 1, 192) * 0.02)

    def seconds(forward: Callable[[Tensor, Tensor], Tensor]) -> float:
        begin = time.perf_counter()
        (forward(images, prompt) @ readout).sum().backward()
        return time.perf_counter() - begin

    sides: list[Callable[[Tensor, Tensor], Tensor]] = [lambda x, p: concatenating(vit, x, p), vit]
    for side in sides:
        seconds(side)  # warm up
    times = [[seconds(side) for side in sides] for _ in range(repeats)]
    ratios = [reference / ours for reference, ours in times]
    value = median(t[0] for t in times) / median(t[1] for t in times)
    return {"value": value, "target": TARGET, "spread": max(ratios) - min(ratios)}
