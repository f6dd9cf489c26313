"""Train `mini`, the ViT for photographs that ships with the package.

    python tools/mini_data.py --tiny-imagenet DIR --cifar DIR --out FOLDER
    python tools/mini_teacher.py --photos FOLDER --teacher deit_tiny_patch16_224.safetensors --views 2
    python tools/pretrain_mini.py --photos FOLDER --teacher FILE --cifar DIR --mnist DIR --run FOLDER/RUN
    python tools/pretrain_mini.py --teacher FILE --run FOLDER/RUN --export mini.safetensors

What is learned is told in mini_student.py. The first sweeps over the photographs, one per view, go in file
order, so that the training may run while the teacher is still at work, and waits for it where it must.
Stop it at any time; the same command goes on from the last checkpoint, and ends up with the same bits as if it
had never been stopped (same machine, same number of threads).

The rate is constant between a warm-up and the last quarter of --images, where it falls to zero. To take a
good model out of a run early, copy its folder and go on there with fewer --images.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Generator, Tensor, nn

from mini_data import PHOTOS, SIZE, crops, cut
from mini_student import Glyphs, Scales, fold, losses
from mini_teacher import GRID, Lessons, load_teacher
from mini_validation import Validation
from procedural import random_glyphs
from protosteer.backbones import Backbone
from protosteer.util.files import write_atomically

SEED = 0
WARM_UP, COOL_DOWN = 10_000, 0.25  # images; share of all images
DECAY, CLIP = 0.02, 1.0
CHECKPOINT = "checkpoint.pt"
SAMPLE = 1000  # photographs that tell the scale of the teacher's numbers
POLL = 5.0  # seconds between looks at whether the teacher is done


@dataclass(frozen=True)
class Recipe:
    """What decides the outcome of a run, but for the number of images, which may change under way."""

    layers: str = "0,1,2,3,4,5,6,7,8,9,10,11"  # of the teacher, that the student begins with
    rows: int = 0  # photographs; 0: all
    views: int = 2
    batch_photos: int = 48
    batch_glyphs: int = 16
    rate: float = 3e-4
    memory: float = 0.999  # of the running mean of weights
    tokens_weight: float = 1.0
    labels_weight: float = 0.0
    patches_weight: float = 0.5
    glyphs_weight: float = 1.0

    @property
    def weights(self) -> dict[str, float]:
        """Of the parts of the loss."""
        return {name: getattr(self, f"{name}_weight") for name in ("tokens", "labels", "patches", "glyphs")}


class Course:
    """Batch after batch: pictures, and what the teacher says of them. Batch n is a function of n alone."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.recipe = recipe
        self.pixels = np.load(folder / PHOTOS, mmap_mode="r")
        self.rows = recipe.rows or len(self.pixels)
        self.lessons = [Lessons(folder, view) for view in range(recipe.views)]
        self.ready = [0] * recipe.views
        self.order: tuple[int, Tensor] = (-1, torch.empty(0))

    def photographs(self, number: int) -> tuple[int, Tensor]:
        """View and rows of a batch."""
        sweep, place = divmod(number, self.rows // self.recipe.batch_photos)
        if self.order[0] != sweep:
            gen = Generator().manual_seed(sweep)
            first = sweep < self.recipe.views
            self.order = sweep, torch.arange(self.rows) if first else torch.randperm(self.rows, generator=gen)
        start = place * self.recipe.batch_photos
        return sweep % self.recipe.views, self.order[1][start : start + self.recipe.batch_photos]

    def said(self, view: int, rows: Tensor) -> list[Tensor]:
        """The teacher's class and patch tokens of these, once it has seen them."""
        last = int(rows.max())
        while (ready := self.ready[view]) <= last:
            self.ready[view] = self.lessons[view].count
            if self.ready[view] == ready:
                time.sleep(POLL)
        return [torch.from_numpy(array[rows.numpy()]).float() for array in self.lessons[view].read()]

    def draw(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Photographs uint8 [n, 3, SIZE, SIZE], the teacher's class and patch tokens; glyphs in 0..1."""
        gen = Generator().manual_seed(SEED + 10**6 + number)
        view, rows = self.photographs(number)
        pixels = cut(torch.from_numpy(self.pixels[rows.numpy()]), crops(rows, view))
        classes, patches = self.said(view, rows)
        # To the teacher a mirrored picture shows the same things, mirrored.
        mirrored = torch.rand(len(rows), 1, 1, 1, generator=gen) < 0.5
        square = patches.unflatten(1, (GRID, GRID))
        patches = torch.where(mirrored, square.flip(2), square).flatten(1, 2)
        pixels = torch.where(mirrored, pixels.flip(3), pixels)
        return pixels, classes, patches, random_glyphs(self.recipe.batch_glyphs, gen)


def learning_rate(seen: int, images: int, peak: float) -> float:
    """Warm-up, plateau, and a straight way down to zero."""
    warm_up = min(WARM_UP, images / 20)
    return peak * min(1.0, (seen + 1) / warm_up, max(0.0, images - seen) / (COOL_DOWN * images))


class Training:
    """A student on its way; everything that a checkpoint must hold."""

    def __init__(self, recipe: Recipe, teacher: Backbone):
        torch.manual_seed(SEED)
        self.recipe, self.step = recipe, 0
        layers = [int(layer) for layer in recipe.layers.split(",")]
        self.vit = fold(teacher.vit, layers)
        self.preprocessing = replace(teacher.preprocessing, image_size=SIZE)
        self.glyphs = Glyphs(self.vit, self.preprocessing, Generator().manual_seed(SEED))
        self.mean = copy.deepcopy(self.vit).requires_grad_(False)  # running, of the weights
        matrices = [p for p in self.vit.parameters() if p.ndim in (2, 4)]
        others = [p for p in self.vit.parameters() if p.ndim not in (2, 4)]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98))

    @property
    def seen(self) -> int:
        return self.step * (self.recipe.batch_photos + self.recipe.batch_glyphs)

    def learn(self, course: Course, scales: Scales, images: int) -> dict[str, float]:
        """One step; gives the parts of the loss."""
        pixels, classes, patches, drawn = course.draw(self.step)
        shown = self.preprocessing.normalise(pixels.float() / 255)
        pictures = torch.cat([shown, self.glyphs.shown(drawn)])
        with torch.autocast("cpu", torch.bfloat16):  # a third faster than without
            tokens = self.vit.tokens(pictures)
        parts = losses(tokens.float(), classes, patches, self.glyphs.target(drawn), scales)
        weights = self.recipe.weights
        self.optimiser.zero_grad()
        torch.stack([weights[name] * part for name, part in parts.items()]).sum().backward()
        nn.utils.clip_grad_norm_(self.vit.parameters(), CLIP)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.seen, images, self.recipe.rate)
        self.optimiser.step()
        self.step += 1
        self._remember()
        return {name: part.item() for name, part in parts.items()}

    @torch.no_grad()
    def _remember(self) -> None:
        keep = min(self.recipe.memory, self.step / (self.step + 9))  # quick to forget the beginning
        for mean, now in zip(self.mean.parameters(), self.vit.parameters(), strict=True):
            mean.lerp_(now, 1 - keep)

    def save(self, file: Path) -> None:
        state = {
            "recipe": dataclasses.asdict(self.recipe),
            "step": self.step,
            "vit": self.vit.state_dict(),
            "mean": self.mean.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "turn": self.glyphs.turn,  # of the untrained student
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(file, buffer.getvalue())

    def restore(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        if state["recipe"] != dataclasses.asdict(self.recipe):
            raise SystemExit(f"{file} was made by another recipe, {state['recipe']}; choose another --run")
        self.step, self.glyphs.turn = state["step"], state["turn"]
        self.vit.load_state_dict(state["vit"])
        self.mean.load_state_dict(state["mean"])
        self.optimiser.load_state_dict(state["optimiser"])

    def backbone(self) -> Backbone:
        """What would be shipped now."""
        return Backbone("mini", self.mean, self.preprocessing, precision="bf16")


def teacher_scales(weights: Path, course: Course) -> Scales:
    """From the first photographs that the teacher has seen."""
    classes, patches = course.said(0, torch.arange(SAMPLE))
    with safe_open(weights, "pt") as file:
        head = [file.get_tensor(f"head.{kind}").float() for kind in ("weight", "bias")]
    return Scales(classes.var(dim=0), patches.flatten(0, 1).var(dim=0), *head)


def go_on(training: Training, course: Course, scales: Scales, args: argparse.Namespace) -> None:
    """Until all images are seen, with a checkpoint now and then, and lines in log.jsonl."""
    validation = Validation(args.cifar, args.mnist)
    began = saved = time.monotonic()
    sums: dict[str, float] = {}
    first = training.step
    while training.seen < args.images:
        for name, part in training.learn(course, scales, args.images).items():
            sums[name] = sums.get(name, 0.0) + part
        over = training.seen >= args.images
        if over or time.monotonic() - saved > 60 * args.minutes:
            steps, first = training.step - first, training.step
            training.save(args.run / CHECKPOINT)
            line: dict[str, Any] = {"images": training.seen, "seconds": round(time.monotonic() - began)}
            line |= {name: round(value / steps, 4) for name, value in sums.items()}
            line |= validation.scores(training.backbone())
            with (args.run / "log.jsonl").open("a") as log:
                print(json.dumps(line), file=log)
            print(json.dumps(line), flush=True)
            sums, saved = {}, time.monotonic()


def export(training: Training, file: Path) -> None:
    """The running mean of the weights, as float16."""
    how, config = training.preprocessing, training.vit.config
    about = {"name": "mini", "heads": config.heads, "licence": "Apache-2.0", **how.to_dict()}
    state = {name: value.half().contiguous() for name, value in training.mean.state_dict().items()}
    write_atomically(file, save(state, metadata={"protosteer": json.dumps(about)}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train mini, or go on with it.")
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="what mini_data.py wrote")
    parser.add_argument("--teacher", type=Path, required=True, metavar="FILE", help="DeiT-Tiny, timm's names")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="cifar-100-python, to judge by")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="MNIST's .gz files, to judge by")
    parser.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="checkpoint and log")
    parser.add_argument("--images", type=int, default=1_200_000, help="to be seen in all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10, help="between checkpoints")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the weights as they are now")
    for field in dataclasses.fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(
            option, dest=f"recipe_{field.name}", type=type(field.default), default=field.default
        )
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    recipe = Recipe(**{f.name: getattr(args, f"recipe_{f.name}") for f in dataclasses.fields(Recipe)})
    teacher = load_teacher(args.teacher)
    training = Training(recipe, teacher)
    if (args.run / CHECKPOINT).exists():
        training.restore(args.run / CHECKPOINT)
    if args.export:
        export(training, args.export)
        return
    args.run.mkdir(parents=True, exist_ok=True)
    course = Course(args.photos, recipe)
    go_on(training, course, teacher_scales(args.teacher, course), args)


if __name__ == "__main__":
    main()
