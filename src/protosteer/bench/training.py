"""One whole training step, from uint8 pixels to the changed prompt: as people commonly write it against ours.

The reference augments image by image in Pillow, puts the prompt among the tokens of every layer and computes the
whole last layer, in float32. Neck, loss, clipping and AdamW are the same on both sides. Late prompts are measured
against our own step with prompts in all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.bench.subjects import LATE, LATE_NANO, pictures, vit_tiny
from protosteer.bench.timing import Ratio, interleaved
from protosteer.data.augment import Augmentation, Choices
from protosteer.data.transforms import Preprocessing
from protosteer.method.prototypes import Prototypes
from protosteer.method.training import Head, initial_prompt, update
from protosteer.method.vit import ViT
from protosteer.settings import Settings

TARGET, TARGET_LATE = 1.6, 1.0
BATCH, BATCH_NANO = 16, 64
CLASSES = 10
EARLIER = 450  # prototypes: nine tasks of ten classes with five centroids each came before


def run(repeats: int) -> list[Ratio]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tiny, nano = Batch.random(vit_tiny(), BATCH), Batch.random(Backbone.load("nano"), BATCH_NANO)
        return [*measure(tiny, LATE, repeats), *measure(nano, LATE_NANO, repeats, "nano")]


def measure(batch: Batch, late: Sequence[int], repeats: int, which: str = "") -> list[Ratio]:
    """The naive step against ours, and ours with prompts in all layers against prompts from layer k on."""
    steps = {"naive": naive(batch), **{f"k{k}": ours(batch, k) for k in (1, *late)}}
    times = interleaved(steps, repeats)
    what = f"training step, {batch.backbone.name}, batch of {len(batch.pixels)}"

    def ratio(name: str, compared: str, reference: str, side: str, target: float) -> Ratio:
        each = [1000 * median(times[one]) / len(batch.pixels) for one in (reference, side)]
        notes = ["{:.2f} ms an image against {:.2f}".format(*each)]
        return Ratio.of(name, f"{what}: {compared}", times[reference], times[side], target, notes)

    suffix, prefix = (f"_{which}", f"{which}_") if which else ("", "")
    return [
        ratio(f"training_step{suffix}", "naive / ours", "naive", "k1", TARGET),
        *(
            ratio(f"late_training_{prefix}k{k}", f"prompts from layer 1 / {k}", "k1", f"k{k}", TARGET_LATE)
            for k in late
        ),
    ]


@dataclass(frozen=True)
class Batch:
    """What both sides are given."""

    backbone: Backbone
    pixels: Tensor
    labels: Tensor
    prototypes: Prototypes

    @classmethod
    def random(cls, backbone: Backbone, size: int) -> Batch:
        means, scales = torch.randn(EARLIER, backbone.dim), torch.rand(EARLIER, backbone.dim)
        earlier = Prototypes(means, scales, torch.arange(EARLIER))
        return cls(backbone, pictures(backbone, size), torch.arange(size) % CLASSES, earlier)


class Step:
    """A step as in method/training.py; how a prompt becomes embeddings [B, D] of the batch is given."""

    def __init__(self, batch: Batch, embed: Callable[[Tensor], Tensor], from_layer: int = 1):
        self.batch, self.embed = batch, embed
        self.settings = Settings(prompt_start="random", prompt_from_layer=from_layer)
        self.prompt = nn.Parameter(initial_prompt(batch.backbone, self.settings, None))
        self.head = Head(batch.backbone.dim, CLASSES, self.settings)
        parameters = [self.prompt, *self.head.parameters()]
        self.optimiser = torch.optim.AdamW(
            parameters, lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay
        )

    def __call__(self) -> None:
        loss = self.head.loss(self.embed(self.prompt), self.batch.labels, self.batch.prototypes)
        groups = [[self.prompt], list(self.head.parameters())]
        update(loss, groups, self.optimiser, self.settings.gradient_clip)


def ours(batch: Batch, from_layer: int = 1) -> Step:
    backbone, layers = batch.backbone, from_layer - 1
    augment = Augmentation(backbone.preprocessing)

    def embed(prompt: Tensor) -> Tensor:
        return backbone.rest(backbone.trunk(augment(batch.pixels), layers), layers, prompt)

    return Step(batch, embed, from_layer)


def naive(batch: Batch) -> Step:
    augment = pillow_augmentation(batch.backbone.preprocessing)
    return Step(batch, lambda prompt: concatenating(batch.backbone.vit, augment(batch.pixels), prompt))


def concatenating(vit: ViT, images: Tensor, prompt: Tensor) -> Tensor:
    """The usual forward pass: a deep prompt [S, L, D] put in as tokens before every layer and cut out after it.

    All tokens leave the last layer, though the class token may be the only one that is used.
    """
    x = vit.embed_patches(images)
    for layer, block in enumerate(vit.blocks):
        tokens = prompt[layer].expand(len(x), -1, -1)
        x = block(torch.cat([x[:, :1], tokens, x[:, 1:]], dim=1))
        x = torch.cat([x[:, :1], x[:, 1 + tokens.shape[1] :]], dim=1)
    return vit.pool(x)


def pillow_augmentation(preprocessing: Preprocessing) -> Callable[[Tensor], Tensor]:
    """The paper's list in Pillow: one image and one step after the other, in 8 bits, then a normalised tensor."""
    draw, size = Augmentation(preprocessing).draw, preprocessing.image_size

    def augment(pixels: Tensor) -> Tensor:
        choices = draw(pixels.shape)
        images = [np.array(_with_pillow(image, choices, i, size)) for i, image in enumerate(pixels)]
        levels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
        return preprocessing.normalise(levels.float().div(255))

    return augment


def _with_pillow(pixels: Tensor, choices: Choices, i: int, size: int) -> Image.Image:
    left, top, right, bottom = choices.boxes[i].tolist()
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).crop((left, top, right, bottom))
    image = image.resize((size, size), Image.Resampling.BICUBIC)
    if choices.mirrored[i]:
        image = ImageOps.mirror(image)
    if choices.jittered[i]:
        factors = choices.factors[i].tolist()
        for step in choices.orders[i].tolist():
            image = _JITTER[step](image, factors[step])
    if choices.grey[i]:
        image = image.convert("L").convert("RGB")
    if choices.blurred[i]:
        image = image.filter(ImageFilter.GaussianBlur(choices.radii[i].item()))
    return ImageOps.solarize(image) if choices.solarized[i] else image


def _shift_hue(image: Image.Image, turns: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(level + round(255 * turns)) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


# In the order of augment.JITTER_STEPS.
_JITTER: tuple[Callable[[Image.Image, float], Image.Image], ...] = (
    lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    _shift_hue,
)
