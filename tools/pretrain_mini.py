"""Train `mini`, the ViT for photographs that ships with the package.

    python tools/mini_data.py --photos DIR [DIR ...] --cifar DIR --out FOLDER
    python tools/mini_teacher.py --photos FOLDER --teacher vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors
    python tools/mini_assistant.py --photos FOLDER --teacher FILE --cifar DIR --mnist DIR --run FOLDER/assistant
    python tools/mini_assistant.py --photos FOLDER --teacher FILE --run FOLDER/assistant --export assistant.safetensors
    python tools/pretrain_mini.py --photos FOLDER --assistant FILE --cifar DIR --mnist DIR --run FOLDER/run
    python tools/pretrain_mini.py --photos FOLDER --assistant FILE --run FOLDER/run --export mini.safetensors

mini begins with drawn weights. It is shown crops of photographs, mirrored at random, and made-up glyphs, and after
every layer should have the tokens that its assistant has there. A layer can only learn that when those before it
have, so at first it is helped: images enter it with the assistant's tokens, and all layers learn at the same time.

Stop it at any time; the same command goes on from the last checkpoint, and ends up with the same bits as if it
had never been stopped (same machine, same number of threads).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor, nn

from mini_data import PHOTOS, SIZE, boxes, cut
from mini_glyphs import Glyphs
from mini_training import SEED, Recipe, Training, parse, train
from procedural import random_glyphs
from protosteer.backbones import Backbone
from protosteer.paper.vit import ViT, ViTConfig

SAMPLE = 256  # photographs that tell the scale of the assistant's numbers
LEAST = 0.1  # variance of a class token, in units of patches': after the first layers it hardly depends on the image
Moments = tuple[Tensor, Tensor]  # variances [D] of class tokens and of patch tokens


@dataclass(frozen=True)
class MiniRecipe(Recipe):
    batch_photos: int = 12
    batch_glyphs: int = 4
    rate: float = 1e-3
    helped: float = 0.2  # share of all images, the first, in which layers are helped
    layers_weight: float = 1.0
    tokens_weight: float = 0.25
    patches_weight: float = 0.1
    glyphs_weight: float = 0.1


def drawn_weights(config: ViTConfig, gen: Generator) -> ViT:
    vit = ViT(config)
    for name, weight in vit.named_parameters():
        if "norm" in name:
            continue
        if name.endswith(".bias"):
            nn.init.zeros_(weight)
        else:
            nn.init.trunc_normal_(weight, std=0.02, generator=gen)
    return vit.requires_grad_(True)


class Pictures:
    """Batch after batch; each is a function of its number alone."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.recipe = recipe
        self.pixels = np.load(folder / PHOTOS, mmap_mode="r")

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        """Photographs uint8 [n, 3, SIZE, SIZE]; glyphs in 0..1."""
        gen = Generator().manual_seed(SEED + 10**6 + number)
        glyphs = random_glyphs(self.recipe.batch_glyphs, gen)
        return self.photographs(self.recipe.batch_photos, gen), glyphs

    def photographs(self, count: int, gen: Generator) -> Tensor:
        rows = torch.randint(len(self.pixels), (count,), generator=gen)
        pixels = torch.from_numpy(self.pixels[rows.numpy()])
        pixels = cut(pixels, boxes(torch.rand(count, 3, generator=gen)), SIZE)
        mirrored = torch.rand(count, 1, 1, 1, generator=gen) < 0.5
        return torch.where(mirrored, pixels.flip(3), pixels)


def after_layers(vit: ViT, pictures: Tensor) -> list[Tensor]:
    """Tokens [B, N, D] after each layer."""
    x, found = vit.embed_patches(pictures), []
    for block in vit.blocks:
        x = block(x)
        found.append(x)
    return found


def after_helped_layers(vit: ViT, pictures: Tensor, said: list[Tensor]) -> list[Tensor]:
    """The same, if every layer but the first is entered by the tokens that another had there."""
    first = vit.blocks[0](vit.embed_patches(pictures))
    return [first, *(block(tokens) for block, tokens in zip(vit.blocks[1:], said[:-1], strict=True))]


def moments(tokens: Tensor, centred: bool = True) -> Moments:
    """Over images and, of patch tokens, places; of updates the means count too."""
    classes, patches = tokens[:, :1], tokens[:, 1:]
    found = [x.var(dim=(0, 1)) if centred else x.square().mean(dim=(0, 1)) for x in (classes, patches)]
    return torch.maximum(found[0], LEAST * found[1]), found[1]


def apart(one: Tensor, other: Tensor, variances: Moments) -> tuple[Tensor, Tensor]:
    """Squared distances of class tokens and of patch tokens, in units of their variances."""
    square = (one.float() - other.float()).square()
    return (square[:, 0] / variances[0]).mean(), (square[:, 1:] / variances[1]).mean()


class FromAssistant:
    """What the assistant says after each layer and at the end; and glyphs."""

    def __init__(self, assistant: Backbone, course: Pictures, recipe: MiniRecipe):
        self.vit, self.course, self.recipe = assistant.vit, course, recipe
        self.glyphs = Glyphs(self.vit, assistant.preprocessing, Generator().manual_seed(SEED))
        sample = course.photographs(SAMPLE, Generator().manual_seed(SEED))
        with torch.no_grad():
            said = after_layers(self.vit, self.glyphs.normalised(sample))
        self.layers = [moments(tokens) for tokens in said]
        updates = [moments(after - before, centred=False) for before, after in pairwise(said)]
        self.updates = [self.layers[0], *updates]
        self.end = moments(self.vit.norm(said[-1]))

    def parts(self, vit: ViT, step: int, done: float) -> dict[str, Tensor]:
        pixels, drawn = self.course.draw(step)
        pictures = torch.cat([self.glyphs.normalised(pixels), self.glyphs.shown(drawn)])
        helped = done < self.recipe.helped
        with torch.autocast("cpu", torch.bfloat16):  # a third faster than without
            # The assistant is frozen, so that nothing is kept of its pass.
            said = after_layers(self.vit, pictures)
            found = after_helped_layers(vit, pictures, said) if helped else after_layers(vit, pictures)
            end, truth = vit.norm(found[-1]).float(), self.vit.norm(said[-1]).float()
        scales = self.updates if helped else self.layers
        layers = [torch.stack(apart(*both)) for both in zip(found, said, scales, strict=True)]
        tokens, patches = apart(end, truth, self.end)
        recipe = self.recipe
        return {
            "layers": recipe.layers_weight * torch.stack(layers).mean(),
            "tokens": recipe.tokens_weight * tokens,
            "patches": recipe.patches_weight * patches,
            "glyphs": recipe.glyphs_weight * self.glyphs.apart(end[len(pixels) :, 0], drawn),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train mini, or go on with it.")
    parser.add_argument("--assistant", type=Path, required=True, metavar="FILE", help="exported by mini_assistant.py")
    args, recipe = parse(parser, MiniRecipe, 300_000)
    assistant = Backbone.load("mini", weights=args.assistant)
    vit = drawn_weights(assistant.vit.config, Generator().manual_seed(SEED))
    lesson = FromAssistant(assistant, Pictures(args.photos, recipe), recipe)
    train(Training(vit, assistant.preprocessing, recipe), lesson, args)


if __name__ == "__main__":
    main()
