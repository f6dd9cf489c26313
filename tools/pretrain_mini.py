"""Train `mini`, the ViT for photographs that ships with the package.

    python tools/mini_data.py --photos DIR [DIR ...] --cifar DIR --out FOLDER
    python tools/mini_teacher.py --photos FOLDER --teacher vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors
    python tools/mini_assistant.py --photos FOLDER --teacher FILE --cifar DIR --mnist DIR --run FOLDER/assistant
    python tools/mini_assistant.py --photos FOLDER --teacher FILE --run FOLDER/assistant --export assistant.safetensors
    python tools/pretrain_mini.py --photos FOLDER --assistant FILE --cifar DIR --mnist DIR --run FOLDER/run
    python tools/pretrain_mini.py --photos FOLDER --assistant FILE --run FOLDER/run --export trained.safetensors
    python tools/mini_assistant.py --photos FOLDER --teacher FILE --cifar DIR --mnist DIR --start trained.safetensors \\
        --rate 1e-4 --cool-down 0.9 --images 25600 --run FOLDER/finish
    (the same) --export mini.safetensors

mini begins with random weights, or with those of an earlier mini (`--start`). It sees crops of photographs, mirrored at
random, and made-up glyphs. After every layer it regresses the assistant's tokens, and in every layer the assistant's
attention. A layer can only learn that if those before it have. Therefore images are *helped*: they enter every layer with
the assistant's tokens, so that all layers learn at the same time.

Stop it at any time; the same command resumes from the last checkpoint, and the result is bit-identical (same machine,
threads and processes). With `torchrun --nproc-per-node N` in place of `python`, N processes share the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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
from protosteer.backbones.build_vit import resample_positions
from protosteer.paper.vit import Block, ViT, ViTConfig

SAMPLE = 256  # photographs that tell the scale of the assistant's numbers
LEAST = 0.1  # variance of a class token, in units of patches': after the first layers it hardly depends on the image
Moments = tuple[Tensor, Tensor]  # variances [D] of class tokens and of patch tokens


@dataclass(frozen=True)
class MiniRecipe(Recipe):
    batch_photos: int = 12
    batch_glyphs: int = 4
    rate: float = 1e-3
    cool_down: float = 0.6
    attention_weight: float = 1.0
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


def started_from(weights: Path, config: ViTConfig) -> ViT:
    """Load mini's weights, perhaps of another image size, for further training."""
    state = dict(Backbone.load("mini", weights=weights).vit.state_dict())
    state["pos_embed"] = resample_positions(state["pos_embed"], config.grid, config.position_for_class)
    vit = ViT(config)
    vit.load_state_dict(state)
    return vit.requires_grad_(True)


class Batches:
    """Batches of photographs and glyphs; each is a function of its number alone."""

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


def layer_by_layer(vit: ViT, pictures: Tensor, help_from: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Compute tokens [B, N, D] after each layer, and its attention's logits [B, heads, N, N].

    With the tokens that another ViT has after each layer, images enter every layer but the first with these.
    """
    x, tokens_after, logits = vit.embed_patches(pictures), [], []
    for number, block in enumerate(vit.blocks):
        assert isinstance(block, Block)
        x = help_from[number - 1] if number and help_from else x
        q, k, v = block.attn.qkv(block.norm1(x)).unflatten(2, (3, vit.config.heads, -1)).permute(2, 0, 3, 1, 4)
        logits.append((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1))
        out = logits[-1].softmax(dim=-1) @ v
        x = block.feed_forward(x + block.attn.proj(out.transpose(1, 2).flatten(2)))
        tokens_after.append(x)
    return tokens_after, logits


def attention_loss(logits: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the mean divergence of the attention from the target, over layers, images, heads and tokens."""
    losses = []
    for student, teacher in zip(logits, targets, strict=True):
        target = teacher.float().log_softmax(dim=-1)
        losses.append((target.exp() * (target - student.float().log_softmax(dim=-1))).sum(dim=-1).mean())
    return torch.stack(losses).mean()


def moments(tokens: Tensor, centred: bool = True) -> Moments:
    """Over images and, of patch tokens, places; of updates the means count too."""
    classes, patches = tokens[:, :1], tokens[:, 1:]
    variances = [x.var(dim=(0, 1)) if centred else x.square().mean(dim=(0, 1)) for x in (classes, patches)]
    return torch.maximum(variances[0], LEAST * variances[1]), variances[1]


def token_losses(tokens: Tensor, targets: Tensor, variances: Moments) -> Tensor:
    """Return squared distances [2] of class tokens and of patch tokens, in units of their variances."""
    square = (tokens.float() - targets.float()).square()
    return torch.stack([(square[:, 0] / variances[0]).mean(), (square[:, 1:] / variances[1]).mean()])


class FromAssistant:
    """The loss of mini: tokens and attention of the assistant in each layer, tokens at the end, and glyphs."""

    def __init__(self, assistant: Backbone, batches: Batches, recipe: MiniRecipe):
        self.vit, self.batches, self.recipe = assistant.vit, batches, recipe
        self.glyphs = Glyphs(self.vit, assistant.preprocessing, Generator().manual_seed(SEED))
        sample = batches.photographs(SAMPLE, Generator().manual_seed(SEED))
        with torch.no_grad():
            targets, _ = layer_by_layer(self.vit, self.glyphs.normalised(sample))
        updates = [moments(after - before, centred=False) for before, after in pairwise(targets)]
        self.updates = [moments(targets[0]), *updates]
        self.end = moments(self.vit.norm(targets[-1]))

    def parts(self, vit: ViT, number: int) -> dict[str, Tensor]:
        recipe = self.recipe
        pixels, glyphs = self.batches.draw(number)
        pictures = torch.cat([self.glyphs.normalised(pixels), self.glyphs.as_images(glyphs)])
        with torch.autocast("cpu", torch.bfloat16):  # a third faster than without
            with torch.no_grad():
                targets, target_logits = layer_by_layer(self.vit, pictures)
            tokens_after, logits = layer_by_layer(vit, pictures, targets)
            end, truth = vit.norm(tokens_after[-1]).float(), self.vit.norm(targets[-1]).float()
        layers = [token_losses(*three) for three in zip(tokens_after, targets, self.updates, strict=True)]
        tokens, patches = token_losses(end, truth, self.end)
        return {
            "layers": recipe.layers_weight * torch.stack(layers).mean(),
            "attention": recipe.attention_weight * attention_loss(logits, target_logits),
            "tokens": recipe.tokens_weight * tokens,
            "patches": recipe.patches_weight * patches,
            "glyphs": recipe.glyphs_weight * self.glyphs.loss(end[len(pixels) :, 0], glyphs),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train mini, or resume its training.")
    parser.add_argument("--assistant", type=Path, required=True, metavar="FILE", help="exported by mini_assistant.py")
    parser.add_argument("--start", type=Path, metavar="FILE", help="an exported mini; default: random weights")
    args, recipe = parse(parser, MiniRecipe, 300_000)
    assistant = Backbone.load("mini", weights=args.assistant)
    config = assistant.vit.config
    vit = started_from(args.start, config) if args.start else drawn_weights(config, Generator().manual_seed(SEED))
    loss = FromAssistant(assistant, Batches(args.photos, recipe), recipe)
    train(Training(vit, assistant.preprocessing, recipe), loss, args)


if __name__ == "__main__":
    main()
