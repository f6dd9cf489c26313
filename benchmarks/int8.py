"""Dynamic int8 for the linear layers of the frozen trunk, all layers but the last. It has no backward pass."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tools import Idea, NotHere, compare, normalised
from protosteer.backbones import Backbone
from protosteer.bench.subjects import vit_tiny
from protosteer.bench.timing import Ratio
from protosteer.vit import ViT

IMAGES, NANO_IMAGES = 16, 256


def quantised(vit: ViT) -> ViT:
    """A copy whose `trunk` computes in int8; its last layer is as it was, and so is what goes beyond Linear."""
    try:
        from torch.ao.quantization import quantize_dynamic
    except ImportError as error:
        raise NotHere(f"this torch has no dynamic quantisation: {error}") from error
    other = copy.deepcopy(vit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of a package of its own
        trunk = quantize_dynamic(other.blocks[:-1], {nn.Linear})
    other.blocks = nn.ModuleList([*trunk, other.blocks[-1]])
    return other


@torch.no_grad()
def trunk(vit: ViT, images: Tensor) -> Tensor:
    return vit.trunk(images, vit.config.depth - 1)


@torch.no_grad()
def differences(vit: ViT, other: ViT, images: Tensor) -> Tensor:
    """[B]: 1 - cosine of the embeddings; the last layer is in float32 on both sides."""
    done = vit.config.depth - 1
    both = [vit.rest(trunk(some, images), done) for some in (vit, other)]
    return 1 - F.cosine_similarity(both[0].double(), both[1].double())


def run(repeats: int) -> list[Ratio]:
    ratios = []
    for name, backbone, count in (
        ("", vit_tiny(), IMAGES),
        ("_nano", Backbone.load("nano"), NANO_IMAGES),
    ):
        vit, other, images = backbone.vit, quantised(backbone.vit), normalised(backbone, count)
        apart = differences(vit, other, images)
        between = 1 - _similarities(vit, images)
        idea = Idea(
            f"int8{name}",
            f"{backbone.name}, {vit.config.depth - 1} layers without a prompt, no gradient: float32 / dynamic int8",
            partial(trunk, other, images),
            [
                f"1 - cosine to float32: mean {apart.mean():.1e}, greatest {apart.max():.1e}; between different "
                f"images: mean {between.mean():.1e}; backward: none"
            ],
        )
        ratios += compare(partial(trunk, vit, images), [idea], repeats, count)
    return ratios


@torch.no_grad()
def _similarities(vit: ViT, images: Tensor) -> Tensor:
    """Cosines of each image's embedding and the next one's."""
    embeddings = vit(images)
    return F.cosine_similarity(embeddings, embeddings.roll(1, dims=0))
