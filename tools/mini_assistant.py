"""Train the assistant between ViT-Tiny and `mini`: a ViT of mini's shape that knows what ViT-Tiny knows.

    python tools/mini_assistant.py --photos FOLDER --teacher vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors \\
        --cifar DIR --mnist DIR --run FOLDER/assistant
    (the same) --export assistant.safetensors

It starts as the teacher at 160 pixels: positions are resampled, and a kernel of other patches than 16 pixels would be
folded. The teacher was trained at 224 pixels and is poorer at 160. The assistant learns to reproduce, from the small
image, the teacher's tokens at 224. What is exported lies halfway between the weights that it began and ended with: few
photographs make it forget some of what the teacher knew, and halfway it is better than at either end. It contains the
teacher's weights, so it is not shipped; mini learns from it, layer by layer (pretrain_mini.py).

With `--start`, mini itself is trained in this way, as the last step.

The first sweeps over the photographs, one per view, follow file order, so that the training may run while the teacher's
tokens are still being computed; it waits for them where it must.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from mini_data import PHOTOS, SIZE, crops, cut
from mini_glyphs import Glyphs
from mini_teacher import GRID, TeacherOutputs, load_teacher
from mini_training import CHECKPOINT, SEED, Recipe, Training, export, parse, train
from pretrain_mini import started_from
from procedural import random_glyphs
from protosteer.backbones.build_vit import resample_positions
from protosteer.paper.vit import ViT

PATCH = SIZE // GRID
SAMPLE = 1000  # photographs that tell the scale of the teacher's numbers
POLL = 5.0  # seconds between looks at whether the teacher is done


@dataclass(frozen=True)
class AssistantRecipe(Recipe):
    batch_photos: int = 40
    batch_glyphs: int = 24
    rate: float = 3e-4
    rows: int = 0  # photographs; 0: all
    views: int = 2
    patches_weight: float = 0.5


def fold(teacher: ViT) -> ViT:
    """The teacher, for pictures of SIZE pixels."""
    config = replace(teacher.config, image_size=SIZE, patch_size=PATCH)
    state = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    state["pos_embed"] = resample_positions(state["pos_embed"], config.grid, config.position_for_class)
    state["patch_embed.proj.weight"] = fold_kernel(state["patch_embed.proj.weight"])
    assistant = ViT(config)
    assistant.load_state_dict(state)
    return assistant.requires_grad_(True)


def fold_kernel(kernel: Tensor) -> Tensor:
    """[D, 3, p, p] -> [D, 3, PATCH, PATCH]: gives for a patch what `kernel` gives for the patch enlarged."""
    points = torch.eye(PATCH**2).view(-1, 1, PATCH, PATCH)
    enlarged = F.interpolate(points, size=tuple(kernel.shape[2:]), mode="bicubic").flatten(1)
    return (kernel.flatten(2) @ enlarged.T).unflatten(2, (PATCH, PATCH))


class Batches:
    """Batches of photographs with the teacher's tokens, and of glyphs."""

    def __init__(self, folder: Path, recipe: AssistantRecipe):
        self.recipe = recipe
        self.pixels = np.load(folder / PHOTOS, mmap_mode="r")
        self.rows = recipe.rows or len(self.pixels)
        self.outputs = [TeacherOutputs(folder, view) for view in range(recipe.views)]
        self.ready = [0] * recipe.views
        self.order: tuple[int, Tensor] = (-1, torch.empty(0))

    def photographs(self, number: int) -> tuple[int, Tensor]:
        """View and rows of a batch."""
        sweep, place = divmod(number, self.rows // self.recipe.batch_photos)
        if self.order[0] != sweep:
            gen = Generator().manual_seed(sweep)
            is_ordered = sweep < self.recipe.views
            self.order = sweep, torch.arange(self.rows) if is_ordered else torch.randperm(self.rows, generator=gen)
        start = place * self.recipe.batch_photos
        return sweep % self.recipe.views, self.order[1][start : start + self.recipe.batch_photos]

    def targets(self, view: int, rows: Tensor) -> list[Tensor]:
        """Return the teacher's class and patch tokens of photographs; wait until they are computed."""
        last_row = int(rows.max())
        while (num_ready := self.ready[view]) <= last_row:
            self.ready[view] = self.outputs[view].count
            if self.ready[view] == num_ready:
                time.sleep(POLL)
        return [torch.from_numpy(array[rows.numpy()]).float() for array in self.outputs[view].read()]

    def draw(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Photographs uint8 [n, 3, SIZE, SIZE], the teacher's class and patch tokens; glyphs in 0..1."""
        gen = Generator().manual_seed(SEED + 10**6 + number)
        view, rows = self.photographs(number)
        pixels = cut(torch.from_numpy(self.pixels[rows.numpy()]), crops(rows, view), SIZE)
        classes, patches = self.targets(view, rows)
        # To the teacher a mirrored picture shows the same things, mirrored.
        mirrored = torch.rand(len(rows), 1, 1, 1, generator=gen) < 0.5
        square = patches.unflatten(1, (GRID, GRID))
        patches = torch.where(mirrored, square.flip(2), square).flatten(1, 2)
        pixels = torch.where(mirrored, pixels.flip(3), pixels)
        return pixels, classes, patches, random_glyphs(self.recipe.batch_glyphs, gen)


class FromTeacher:
    """The loss of the assistant: squared distance to the teacher's tokens in units of their variance, and glyphs."""

    def __init__(self, batches: Batches, glyphs: Glyphs):
        self.batches, self.glyphs = batches, glyphs
        classes, patches = batches.targets(0, torch.arange(SAMPLE))
        self.variances = classes.var(dim=0), patches.flatten(0, 1).var(dim=0)

    def parts(self, vit: ViT, number: int) -> dict[str, Tensor]:
        pixels, classes, patches, glyphs = self.batches.draw(number)
        pictures = torch.cat([self.glyphs.normalised(pixels), self.glyphs.as_images(glyphs)])
        with torch.autocast("cpu", torch.bfloat16):  # a third faster than without
            tokens = vit.norm(vit.trunk(pictures, vit.config.depth)).float()
        photos, strokes = tokens.split([len(pixels), len(glyphs)])
        class_loss = (photos[:, 0] - classes).square() / self.variances[0]
        patch_loss = (photos[:, 1:] - patches).square() / self.variances[1]
        return {
            "tokens": class_loss.mean(),
            "patches": self.batches.recipe.patches_weight * patch_loss.mean(),
            "glyphs": self.glyphs.loss(strokes[:, 0], glyphs),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train mini's assistant, or resume its training.")
    parser.add_argument("--teacher", type=Path, required=True, metavar="FILE", help="named as timm names it")
    parser.add_argument(
        "--start", type=Path, metavar="FILE", help="an exported mini to finish; default: the teacher's weights"
    )
    args, recipe = parse(parser, AssistantRecipe, 48_000)
    teacher = load_teacher(args.teacher)
    preprocessing, start = replace(teacher.preprocessing, image_size=SIZE), fold(teacher.vit)
    if args.start:
        start = started_from(args.start, start.config)
    training = Training(copy.deepcopy(start), preprocessing, recipe)
    if args.export:
        training.restore(args.run / CHECKPOINT)
        for end, begin in zip(training.mean.parameters(), start.parameters(), strict=True):
            end.data.lerp_(begin, 0.5)
        export(training, args.export)
        return
    glyphs = Glyphs(start, preprocessing, Generator().manual_seed(SEED))
    train(training, FromTeacher(Batches(args.photos, recipe), glyphs), args)


if __name__ == "__main__":
    main()
