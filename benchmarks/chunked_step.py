"""A training step whose forward pass goes through the batch in chunks, for the caches' sake.

The loss compares all images of the batch, so chunks are joined before it and one backward pass follows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.tools import Idea, compare, normalised, prompts
from protosteer.backbones import Backbone
from protosteer.bench.subjects import vit_tiny
from protosteer.bench.timing import Ratio
from protosteer.settings import Settings
from protosteer.training import Head
from protosteer.vit import ViT

BATCH = 48
CHUNKS = (4, 8, 16)
CLASSES = 6


def chunked(vit: ViT, head: Head, images: Tensor, prompt: Tensor, chunk: int) -> Tensor:
    """The prompt's gradient; the neck's is computed too."""
    embeddings = torch.cat([vit(some, prompt) for some in images.split(chunk)])
    labels = torch.arange(len(images)) % CLASSES
    loss = head.loss(embeddings, labels, None)
    return torch.autograd.grad(loss, [prompt, *head.parameters()])[0]


def run(repeats: int) -> list[Ratio]:
    tiny, nano = vit_tiny(), Backbone.load("nano")
    return [*_measured("", tiny, repeats), *_measured("_nano", nano, repeats)]


def _measured(name: str, backbone: Backbone, repeats: int) -> list[Ratio]:
    vit, images = backbone.vit, normalised(backbone, BATCH)
    head, prompt = Head(vit.config.dim, CLASSES, Settings()), prompts(vit, 1)[0].requires_grad_()
    training = partial(chunked, vit, head, images, prompt)
    ideas = [
        Idea(
            f"chunked_step_{chunk}{name}",
            f"{backbone.name}, training step of {BATCH} images: whole batch / chunks of {chunk}",
            partial(training, chunk),
        )
        for chunk in CHUNKS
    ]
    return compare(partial(training, BATCH), ideas, repeats, BATCH)
