"""Train the ViTs of `mini` in steps that a kill does not lose, with the same result whether killed or not.

Batch n is a function of n alone. The learning rate is constant between a warm-up and a cool-down, in which it falls to
zero; to end a run early, continue it with fewer --images. The exported weights are a running mean.

Under torchrun every process draws batches of its own, and gradients are averaged.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from mini_validation import Validation
from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.paper.vit import ViT
from protosteer.util.distributed import join, process_group
from protosteer.util.files import write_atomically

SEED = 0
WARM_UP = 10_000  # images
DECAY, CLIP = 0.02, 1.0
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Recipe:
    """What decides the outcome of a run, but for the number of images, which may change under way."""

    batch_photos: int
    batch_glyphs: int
    rate: float
    memory: float = 0.999  # of the running mean of weights
    cool_down: float = 0.25  # share of all images, the last, in which the learning rate falls


Some = TypeVar("Some", bound=Recipe)


class Loss(Protocol):
    """What a training minimises."""

    def parts(self, vit: ViT, number: int) -> dict[str, Tensor]:
        """Return the parts of the loss of batch `number`, to be added."""


def learning_rate(num_seen: int, images: int, recipe: Recipe) -> float:
    """Warm-up, plateau, and a linear fall to zero."""
    warm_up = min(WARM_UP, images / 20)
    return recipe.rate * min(1.0, (num_seen + 1) / warm_up, max(0.0, images - num_seen) / (recipe.cool_down * images))


class Training:
    """A ViT in training: everything that a checkpoint holds."""

    def __init__(self, vit: ViT, preprocessing: Preprocessing, recipe: Recipe):
        self.vit, self.preprocessing, self.recipe, self.step = vit, preprocessing, recipe, 0
        self.mean = copy.deepcopy(vit).requires_grad_(False)  # running, of the weights
        matrices = [p for p in vit.parameters() if p.ndim in (2, 4)]
        vectors = [p for p in vit.parameters() if p.ndim not in (2, 4)]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self.group = process_group()
        self.processes = self.group.size  # of the checkpoint that was restored

    @property
    def num_seen(self) -> int:
        return self.step * self.group.size * (self.recipe.batch_photos + self.recipe.batch_glyphs)

    def learn(self, loss: Loss, images: int) -> dict[str, float]:
        """One step; gives the parts of the loss."""
        number = self.step * self.group.size + self.group.rank
        parts = loss.parts(self.vit, number)
        self.optimiser.zero_grad()
        torch.stack(list(parts.values())).sum().backward()
        self._average_gradients()
        nn.utils.clip_grad_norm_(self.vit.parameters(), CLIP)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.num_seen, images, self.recipe)
        self.optimiser.step()
        self.step += 1
        self._remember()
        return {name: part.item() for name, part in parts.items()}

    def _average_gradients(self) -> None:
        if self.group.size == 1:
            return
        gradients = [p.grad for p in self.vit.parameters() if p.grad is not None]
        mean = self.group.reduce_sum(torch.cat([g.flatten() for g in gradients])) / self.group.size
        for gradient, values in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))

    @torch.no_grad()
    def _remember(self) -> None:
        keep = min(self.recipe.memory, self.step / (self.step + 9))  # quick to forget the beginning
        for mean, weights in zip(self.mean.parameters(), self.vit.parameters(), strict=True):
            mean.lerp_(weights, 1 - keep)

    def save(self, file: Path) -> None:
        state = {
            "recipe": dataclasses.asdict(self.recipe),
            "processes": self.group.size,
            "step": self.step,
            "vit": self.vit.state_dict(),
            "mean": self.mean.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(file, buffer.getvalue())

    def restore(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        if state["recipe"] != dataclasses.asdict(self.recipe):
            raise SystemExit(f"{file} was made by another recipe, {state['recipe']}; choose another --run")
        self.step, self.processes = state["step"], state["processes"]
        self.vit.load_state_dict(state["vit"])
        self.mean.load_state_dict(state["mean"])
        self.optimiser.load_state_dict(state["optimiser"])

    def backbone(self) -> Backbone:
        """What would be kept now."""
        return Backbone("mini", self.mean, self.preprocessing, precision="bf16")


def run_training(training: Training, loss: Loss, args: argparse.Namespace) -> None:
    """Until all images are seen, with a checkpoint now and then, and lines in log.jsonl."""
    validation = Validation(args.cifar, args.mnist, args.folders)
    began = time.monotonic()
    sums: dict[str, float] = {}
    first_step, saved_images = training.step, training.num_seen
    while training.num_seen < args.images:
        for name, part in training.learn(loss, args.images).items():
            sums[name] = sums.get(name, 0.0) + part
        if training.num_seen < args.images and training.num_seen - saved_images < args.every:
            continue
        scores = validation.scores(training.backbone())  # every process embeds a part of the images
        if training.group.is_rank0:
            training.save(args.run / CHECKPOINT)
            line: dict[str, Any] = {"images": training.num_seen, "seconds": round(time.monotonic() - began)}
            line |= {name: round(value / (training.step - first_step), 4) for name, value in sums.items()} | scores
            with (args.run / "log.jsonl").open("a") as log:
                print(json.dumps(line), file=log)
            print(json.dumps(line), flush=True)
        sums, first_step, saved_images = {}, training.step, training.num_seen


def export(training: Training, file: Path) -> None:
    """The running mean of the weights, as float16."""
    preprocessing, config = training.preprocessing, training.vit.config
    metadata = {"name": "mini", "heads": config.heads, "licence": "Apache-2.0", **preprocessing.to_dict()}
    state = {name: value.half().contiguous() for name, value in training.mean.state_dict().items()}
    write_atomically(file, save(state, metadata={"protosteer": json.dumps(metadata)}))


def parse(parser: argparse.ArgumentParser, kind: type[Some], images: int) -> tuple[argparse.Namespace, Some]:
    """What every training is told, and its recipe."""
    parser.add_argument("--photos", type=Path, required=True, metavar="FOLDER", help="what mini_data.py wrote")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="cifar-100-python, to judge by")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="MNIST's .gz files, to judge by")
    parser.add_argument("--folders", type=Path, nargs="*", default=[], metavar="DIR", help="of classes, to judge by")
    parser.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="checkpoint and log")
    parser.add_argument("--images", type=int, default=images, help="to be seen in all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every", type=int, default=50_000, help="images between checkpoints")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the weights as they are now")
    fields: Sequence[dataclasses.Field[Any]] = dataclasses.fields(kind)
    for field in fields:
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if "RANK" in os.environ:
        join()
    return args, kind(**{field.name: getattr(args, field.name) for field in fields})


def train(training: Training, loss: Loss, args: argparse.Namespace) -> None:
    """From the last checkpoint to the end; or only write what it holds."""
    if (args.run / CHECKPOINT).exists():
        training.restore(args.run / CHECKPOINT)
    if args.export:
        export(training, args.export)
        return
    if training.processes != training.group.size:
        raise SystemExit(f"{args.run} was made by {training.processes} processes; start as many")
    args.run.mkdir(parents=True, exist_ok=True)
    run_training(training, loss, args)
    if training.group.size > 1:
        training.group.leave()
