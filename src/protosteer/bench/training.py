"""One whole training step, from uint8 pixels to the changed prompt: as people commonly write it against ours.

The reference augments image by image in Pillow, puts the prompt among the tokens of every layer and computes the
whole last layer, in float32. Neck, loss, clipping and AdamW are the same on both sides.

Late prompts are measured against our own step with prompts in all layers. With cached views a step begins at the
trunk's tokens; to its time belongs its share of the time in which the cache was filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.bench.augmentation import PillowAugmentation
from protosteer.bench.subjects import concatenating, pictures, vit_tiny
from protosteer.bench.timing import Ratio, Side, interleaved
from protosteer.data.augment import Augmentation
from protosteer.data.images import ArrayImages
from protosteer.method.anchors import Anchors
from protosteer.method.training import Head, initial_prompt, update
from protosteer.method.views import CachedViews, FreshViews, Views
from protosteer.settings import Settings

TARGET = 1.6
TARGET_LATE = 1.0
BATCH, BATCH_NANO = 16, 64
CLASSES = 10
EARLIER = 450  # prototypes: nine tasks of ten classes with five centroids each came before
LATE, LATE_NANO = (4, 7, 10), (2,)  # layers that prompts begin in
VIEWS, EPOCHS = 4, 15  # so each step pays for VIEWS / EPOCHS of a batch's way into the cache

Embed = Callable[[Tensor], Tensor]  # a prompt [S, L, D] -> embeddings [B, D] of the batch


@dataclass(frozen=True)
class Batch:
    """What both sides are given."""

    backbone: Backbone
    pixels: Tensor
    labels: Tensor
    anchors: Anchors

    @classmethod
    def random(cls, backbone: Backbone, size: int) -> Batch:
        pixels = pictures(backbone, size)
        means, scales = torch.randn(EARLIER, backbone.dim), torch.rand(EARLIER, backbone.dim)
        anchors = Anchors(means, scales, torch.arange(EARLIER))
        return cls(backbone, pixels, torch.arange(size) % CLASSES, anchors)

    def fresh(self, layers: int = 0) -> FreshViews:
        augment = Augmentation(self.backbone.preprocessing)
        return FreshViews(self.backbone, ArrayImages(self.pixels), augment, layers)


class Step:
    """A step as in training.py, but for how the batch is embedded."""

    def __init__(self, batch: Batch, embed: Embed, from_layer: int = 1):
        self.batch, self.embed = batch, embed
        self.settings = Settings(prompt_start="random", prompt_from_layer=from_layer)
        self.prompt = nn.Parameter(initial_prompt(batch.backbone, self.settings, None))
        self.head = Head(batch.backbone.dim, CLASSES, self.settings)
        parameters = [self.prompt, *self.head.parameters()]
        self.optimiser = torch.optim.AdamW(
            parameters, lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay
        )

    def __call__(self) -> None:
        loss = self.head.loss(self.embed(self.prompt), self.batch.labels, self.batch.anchors)
        update(loss, self.prompt, self.head, self.optimiser, self.settings.gradient_clip)


def naive(batch: Batch) -> Step:
    augment = PillowAugmentation(batch.backbone.preprocessing)
    return Step(batch, lambda prompt: concatenating(batch.backbone.vit, augment(batch.pixels), prompt))


def ours(batch: Batch, views: Views | None = None, from_layer: int = 1) -> Step:
    """On views of the batch after the layers without prompts; None: fresh ones."""
    layers = from_layer - 1
    source = views or batch.fresh(layers)
    order = [torch.arange(len(batch.pixels))]

    def embed(prompt: Tensor) -> Tensor:
        (tokens,) = source.batches(0, order)
        return batch.backbone.rest(tokens, layers, prompt)

    return Step(batch, embed, from_layer)


def run(repeats: int) -> list[Ratio]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tiny, nano = Batch.random(vit_tiny(), BATCH), Batch.random(Backbone.load("nano"), BATCH_NANO)
        return [
            against_naive("training_step", tiny, repeats),
            against_naive("training_step_nano", nano, repeats),
            *late_prompts(tiny, LATE, repeats),
            *late_prompts(nano, LATE_NANO, repeats, "nano_"),
        ]


def against_naive(name: str, batch: Batch, repeats: int) -> Ratio:
    backbone, pixels = batch.backbone, batch.pixels
    pillow, tensors = PillowAugmentation(backbone.preprocessing), Augmentation(backbone.preprocessing)
    images = tensors(pixels)
    embeddings = backbone.embed(images)
    prompt = nn.Parameter(initial_prompt(backbone, Settings(prompt_start="random"), None))
    sides: dict[str, Side] = {
        "reference": naive(batch),
        "ours": ours(batch),
        "reference, augmentation": lambda: pillow(pixels),
        "ours, augmentation": lambda: tensors(pixels),
        "reference, backbone": lambda: concatenating(backbone.vit, images, prompt).sum().backward(),
        "ours, backbone": lambda: backbone.embed(images, prompt).sum().backward(),
        "head": Step(batch, lambda _: embeddings),
    }
    times = interleaved(sides, repeats)
    about = f"training step, {backbone.name}, batch of {len(pixels)}: naive / ours"
    return Ratio.of(name, about, times["reference"], times["ours"], TARGET, _notes(times, len(pixels)))


def _notes(times: Mapping[str, Sequence[float]], images: int) -> list[str]:
    """Where the time goes. Parts are measured by themselves, so they need not add up."""
    each = {part: milliseconds(seconds, images) for part, seconds in times.items()}
    return [
        f"{side}: {1000 / each[side]:.1f} images/s, {each[side]:.2f} ms an image; augmentation alone "
        f"{each[f'{side}, augmentation']:.2f} ms, backbone forward and back {each[f'{side}, backbone']:.2f} ms, "
        f"neck, loss and AdamW {each['head']:.2f} ms"
        for side in ("reference", "ours")
    ]


def late_prompts(batch: Batch, late: Sequence[int], repeats: int, which: str = "") -> list[Ratio]:
    """Our step with prompts from layer k on, on fresh and on cached views, against k = 1 on fresh ones."""
    size = len(batch.pixels)
    sides: dict[str, Side] = {}
    for k in (1, *late):
        fill = _fill(batch, k - 1)
        sides |= {
            f"fresh {k}": ours(batch, None, k),
            f"cached {k}": ours(batch, fill(), k),
            f"fill {k}": fill,
        }
    times = interleaved(sides, repeats)
    reference = times["fresh 1"]
    ratios = [
        _late(f"late_training_{which}k{k}", f"from layer {k}", reference, times[f"fresh {k}"], size)
        for k in late
    ]
    for k in (1, *late):
        shares = [VIEWS / EPOCHS * seconds for seconds in times[f"fill {k}"]]
        steps = [step + share for step, share in zip(times[f"cached {k}"], shares, strict=True)]
        what = f"from layer {k} on {VIEWS} cached views, {EPOCHS} epochs"
        ratio = _late(f"cached_training_{which}k{k}", what, reference, steps, size)
        ratio.notes.append(f"of ours, {milliseconds(shares, size):.2f} ms are its share of filling the cache")
        ratios.append(ratio)
    return ratios


def _fill(batch: Batch, layers: int) -> Callable[[], CachedViews]:
    """One view of each image on its way into the cache."""
    return lambda: CachedViews(batch.fresh(layers), 1, len(batch.pixels))


def _late(name: str, what: str, reference: Sequence[float], times: Sequence[float], images: int) -> Ratio:
    first, late = milliseconds(reference, images), milliseconds(times, images)
    about = f"training step, prompts from layer 1 / {what}"
    return Ratio.of(
        name, about, reference, times, TARGET_LATE, [f"{first:.2f} ms an image against {late:.2f}"]
    )


def milliseconds(seconds: Sequence[float], images: int) -> float:
    return 1000 * median(seconds) / images
