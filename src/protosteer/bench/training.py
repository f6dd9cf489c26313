"""One whole training step, from uint8 pixels to the changed prompt: as people commonly write it against ours.

The reference augments image by image in Pillow, puts the prompt among the tokens of every layer and computes
the whole last layer, in float32. Neck, loss, clipping and AdamW are the same on both sides. Late prompts are
measured against our own step with prompts in all layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.backbones.precision import FP32
from protosteer.bench.harness import Ratio, by_layer, pictures, quarters, vit_tiny
from protosteer.data.augment import Augmentation, Choices
from protosteer.paper.prompts import initial_prompt
from protosteer.paper.prototypes import Anchors
from protosteer.paper.trainer import Head, update
from protosteer.paper.vit import ViT
from protosteer.settings import Settings

TARGET = 1.6
BATCH, BATCH_NANO = 16, 64
CLASSES = 10
EARLIER = 450  # prototypes: nine tasks of ten classes with five centroids each came before


def run(repeats: int) -> list[Ratio]:
    """Measure a ViT-Ti and `nano`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tiny = measure("training_step", vit_tiny(), BATCH, repeats)
        return tiny + measure("training_step_nano", Backbone.load("nano", precision=FP32), BATCH_NANO, repeats)


def measure(name: str, backbone: Backbone, size: int, repeats: int, precision: str = FP32) -> list[Ratio]:
    """Measure steps of `size` images in a precision, against naive ones in fp32; late prompts in fp32 alone."""
    pixels, computing = pictures(backbone, size), backbone.in_precision(precision)
    layers = quarters(backbone) if precision == FP32 else [1]
    steps = {0: naive(backbone, pixels), **{k: ours(computing, pixels, k) for k in layers}}
    about = f"training step, {backbone.name}, batch of {size}: naive in fp32 / ours in {precision}"
    return by_layer(name, about, size, steps, TARGET, repeats)


class Step:
    """A step as in paper/trainer.py; how a prompt becomes embeddings [B, D] of the batch is given."""

    def __init__(self, backbone: Backbone, size: int, embed: Callable[[Tensor], Tensor], from_layer: int = 1):
        settings = Settings(prompt_start="random", prompt_from_layer=from_layer)
        self.embed, self.clip = embed, settings.gradient_clip
        self.prompt = nn.Parameter(initial_prompt(backbone, settings, None))
        self.head = Head(backbone.dim, CLASSES, settings)
        parameters = [self.prompt, *self.head.parameters()]
        self.optimiser = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        self.labels = torch.arange(size) % CLASSES
        means, deviations = torch.randn(EARLIER, backbone.dim), torch.rand(EARLIER, backbone.dim)
        self.prototypes = Anchors(means, deviations, torch.arange(EARLIER))

    def __call__(self) -> None:
        """Make the step."""
        loss = self.head.loss(self.embed(self.prompt), self.labels, self.prototypes)
        update(loss, [[self.prompt], list(self.head.parameters())], self.optimiser, self.clip)


def ours(backbone: Backbone, pixels: Tensor, from_layer: int = 1) -> Step:
    """Return our step: batched augmentation, prompts as key/value prefixes."""
    augment, layers = Augmentation(backbone.preprocessing), from_layer - 1

    def embed(prompt: Tensor) -> Tensor:
        return backbone.embed_tokens(backbone.trunk(augment(pixels), layers), layers, prompt)

    return Step(backbone, len(pixels), embed, from_layer)


def naive(backbone: Backbone, pixels: Tensor) -> Step:
    """Return the reference: augmentation in Pillow, prompts as tokens."""
    augment = Augmentation(backbone.preprocessing)

    def embed(prompt: Tensor) -> Tensor:
        return concatenating(backbone.vit, by_pillow(augment, pixels), prompt)

    return Step(backbone, len(pixels), embed)


def concatenating(vit: ViT, images: Tensor, prompt: Tensor) -> Tensor:
    """Compute the usual forward pass: a deep prompt [S, L, D] enters as tokens before every layer and is cut out after.

    All tokens leave the last layer, though the class token may be the only one that is used.
    """
    x = vit.embed_patches(images)
    for layer, block in enumerate(vit.blocks):
        tokens = prompt[layer].expand(len(x), -1, -1)
        x = block(torch.cat([x[:, :1], tokens, x[:, 1:]], dim=1))
        x = torch.cat([x[:, :1], x[:, 1 + tokens.shape[1] :]], dim=1)
    return vit.pool(x)


def by_pillow(augment: Augmentation, pixels: Tensor) -> Tensor:
    """Augment and normalise images as `augment` draws it, but in Pillow: image by image, step by step, in 8 bits."""
    choices, size = augment.draw(pixels.shape), augment.preprocessing.image_size
    images = [np.array(_one_by_pillow(image, choices, i, size)) for i, image in enumerate(pixels)]
    levels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return augment.preprocessing.normalise(levels.float().div(255))


def _one_by_pillow(pixels: Tensor, choices: Choices, i: int, size: int) -> Image.Image:
    left, top, right, bottom = choices.boxes[i].tolist()
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).crop((left, top, right, bottom))
    image = image.resize((size, size), Image.Resampling.BICUBIC)
    if choices.mirrored[i]:
        image = ImageOps.mirror(image)
    if choices.jittered[i]:
        for step in choices.orders[i].tolist():
            image = _jitter(image, step, choices.factors[i, step].item())
    if choices.grey[i]:
        image = image.convert("L").convert("RGB")
    if choices.blurred[i]:
        image = image.filter(ImageFilter.GaussianBlur(choices.radii[i].item()))
    return ImageOps.solarize(image) if choices.solarized[i] else image


def _jitter(image: Image.Image, step: int, factor: float) -> Image.Image:
    """Apply one colour step, numbered as in augment.JITTER_STEPS; the last one turns the hue."""
    if step < 3:
        enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[step]
        return enhance(image).enhance(factor)
    hue, saturation, value = image.convert("HSV").split()
    new_hue = hue.point([(level + round(255 * factor)) % 256 for level in range(256)])
    return Image.merge("HSV", (new_hue, saturation, value)).convert("RGB")
