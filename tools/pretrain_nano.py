"""Train `nano`, the small ViT that ships with the package, and measure it.

nano learns to say three things about a 32-px picture, by regression and without any label:

- where edges of which direction are: a histogram of oriented gradients, computed here (`edges`);
- where which colours are: a thumbnail of 8 x 8 pixels (`layout`);
- for photographs also what a DeiT-Tiny sees in them: its class token, for the picture enlarged.

The descriptions are centred, reduced by PCA, weighted (`PARTS`) and put side by side; nano's embedding
itself, without any head, is turned towards the joint vector. Photographs are CIFAR-100's training images.
Beside them stand made-up glyphs (`procedural.py`), for which the teacher's part is zero. No digit is ever
seen.

    python tools/pretrain_nano.py --cifar DIR --teacher deit_tiny_patch16_224.safetensors --out nano.safetensors
    python tools/pretrain_nano.py --evaluate nano.safetensors --cifar DIR --mnist DIR --notmnist DIR
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from itertools import compress
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from procedural import random_glyphs
from protosteer.backbones import Backbone
from protosteer.data.datasets.cifar import read_cifar100
from protosteer.data.datasets.idx import read_idx
from protosteer.data.images import ArrayImages
from protosteer.paper.vit import ViT, ViTConfig
from protosteer.streams import split_digits

NANO = ViTConfig(image_size=32, patch_size=8, dim=128, depth=3, heads=4, mlp_dim=512, pool="mean")
METADATA = {
    "name": "nano",
    "heads": NANO.heads,
    "image_size": NANO.image_size,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "crop": 1.0,
    "interpolation": "bicubic",
    "licence": "Apache-2.0",
}
CELL, BINS = 8, 12  # of the edge histogram: 4 x 4 cells, signed directions
THUMBNAIL = 8
TEACHER_SIZE = 160  # pixels that the teacher sees
PHOTOGRAPHS = 20_000  # of CIFAR-100
PEAK_RATE, SEED = 2e-3, 0
# Dimensions of each part of the target, and its squared length in the targets of photographs and of glyphs.
PARTS = {"edges": (48, 0.25, 0.6), "layout": (32, 0.15, 0.4), "teacher": (48, 0.6, 0.0)}
Labelled = tuple[Tensor, list[str]]  # images and labels
Split = tuple[Tensor, list[str], Tensor, list[str]]  # those for training, and those for testing


# Data


def read_mnist(folder: Path, split: str) -> Labelled:
    """Images uint8 [N, 3, 28, 28] and labels of files in MNIST's format."""
    images, labels = (folder / f"{split}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    pixels = read_idx(images, 3).unsqueeze(1).expand(-1, 3, -1, -1)
    return pixels, [str(label) for label in read_idx(labels, 1).tolist()]


def split_per_class(pixels: Tensor, labels: list[str], count: int) -> tuple[Labelled, Labelled]:
    """The first `count` images of each class, in file order, and all others."""
    counts: Counter[str] = Counter()
    is_head = []
    for label in labels:
        counts[label] += 1
        is_head.append(counts[label] <= count)
    is_tail = [not is_in_head for is_in_head in is_head]
    parts = [(pixels[torch.tensor(rows)], list(compress(labels, rows))) for rows in (is_head, is_tail)]
    return parts[0], parts[1]


def cifar_split(folder: Path, classes: int) -> Split:
    """The first 20 training and 10 test images per class."""
    parts = []
    for split, count in (("train", 20), ("test", 10)):
        pixels, numbers, _ = read_cifar100(folder, split)
        is_wanted = numbers < classes
        parts.append(split_per_class(pixels[is_wanted], [str(n) for n in numbers[is_wanted].tolist()], count)[0])
    return *parts[0], *parts[1]


def mnist_split(folder: Path) -> Split:
    """100 training images per class; all test images."""
    return *split_per_class(*read_mnist(folder, "train"), 100)[0], *read_mnist(folder, "t10k")


def notmnist_split(folder: Path) -> Split:
    """Letters A to J of the test file: the first 100 per class make the prototypes, the rest is classified."""
    train, test = split_per_class(*read_mnist(folder, "t10k"), 100)
    return *train, *test


def digits_split() -> Split:
    """The demo's own split, in one task."""
    task = split_digits(1)[0]
    train, test = (images.pixels(range(len(images))) for images in (task.train, task.test))
    return train, task.train_labels, test, task.test_labels


# Measuring


def nearest_class_mean(embed: Callable[[Tensor], Tensor], split: Split) -> float:
    """Percent of test images whose nearest class mean, by cosine, is that of their own class."""
    train, labels, test, truth = split
    names = sorted(set(labels))
    embeddings = embed(train)
    owner = torch.tensor([names.index(label) for label in labels])
    means = torch.stack([embeddings[owner == i].mean(dim=0) for i in range(len(names))])
    nearest = (F.normalize(embed(test), dim=1) @ F.normalize(means, dim=1).T).argmax(dim=1).tolist()
    return 100 * sum(names[b] == t for b, t in zip(nearest, truth, strict=True)) / len(truth)


def evaluate(file: Path, args: argparse.Namespace) -> dict[str, float]:
    """Training-free accuracy on whatever data was named; digits only when asked for."""
    splits: dict[str, Callable[[], Split]] = {}
    if args.cifar:
        splits["cifar100_first10"] = lambda: cifar_split(args.cifar, 10)
        splits["cifar100_all"] = lambda: cifar_split(args.cifar, 100)
    if args.mnist:
        splits["mnist"] = lambda: mnist_split(args.mnist)
    if args.notmnist:
        splits["notmnist"] = lambda: notmnist_split(args.notmnist)
    if args.digits:
        splits["digits"] = digits_split
    backbone = Backbone.load("nano", weights=file)

    def embed(pixels: Tensor) -> Tensor:
        if args.pixels:
            return (backbone.preprocessing(pixels.contiguous()) + 1).flatten(1)
        return backbone.embed_pixels(pixels.contiguous(), batch_size=256)

    return {name: round(nearest_class_mean(embed, split()), 2) for name, split in splits.items()}


# Descriptions to learn


def edges(images: Tensor) -> Tensor:
    """Histograms of gradient directions [N, BINS * cells] of images [N, 3, 32, 32] in 0..1.

    A pixel votes with its gradient's length, split linearly over the two nearest directions and, by a
    triangular window, over the nearest cells. The whole histogram is scaled to length 1, then square-rooted.
    """
    smooth = torch.tensor([1.0, 2.0, 1.0]) / 4
    grey = F.pad(images.mean(dim=1, keepdim=True), (2, 2, 2, 2), mode="replicate")
    grey = F.conv2d(grey, (smooth[:, None] * smooth)[None, None])  # [N, 1, 34, 34]
    dx = grey[:, :, 1:-1, 2:] - grey[:, :, 1:-1, :-2]
    dy = grey[:, :, 2:, 1:-1] - grey[:, :, :-2, 1:-1]
    length = (dx.square() + dy.square() + 1e-8).sqrt()
    place = torch.atan2(dy, dx).remainder(2 * math.pi) * (BINS / (2 * math.pi))
    lower = place.floor()
    votes = torch.zeros(len(images), BINS, *dx.shape[2:])
    votes.scatter_add_(1, lower.long() % BINS, length * (1 - (place - lower)))
    votes.scatter_add_(1, (lower.long() + 1) % BINS, length * (place - lower))
    window = 1 - (torch.arange(2 * CELL) + 0.5 - CELL).abs() / CELL
    padded = F.pad(votes.flatten(0, 1).unsqueeze(1), (CELL // 2,) * 4)
    cells = F.conv2d(padded, (window[:, None] * window)[None, None], stride=CELL)
    histogram = cells.reshape(len(images), -1)
    return (histogram / (histogram.norm(dim=1, keepdim=True) + 1e-3)).sqrt()


def layout(images: Tensor) -> Tensor:
    """Thumbnails [N, 3 * THUMBNAIL²] of images [N, 3, 32, 32]."""
    return F.adaptive_avg_pool2d(images, THUMBNAIL).flatten(1)


@torch.no_grad()
def teacher_embeddings(weights: Path, pixels: Tensor) -> Tensor:
    """DeiT-Tiny's class tokens [N, 192] for enlarged images."""
    teacher = Backbone.load("deit_tiny_patch16_224", weights=weights, image_size=TEACHER_SIZE, crop=1.0)
    began = time.time()

    def tell(num_done: int) -> None:
        if num_done % 2000 == 0:
            print(f"teacher: {num_done} of {len(pixels)} images, {time.time() - began:.0f} s", flush=True)

    return teacher.embed_set(ArrayImages(pixels), batch_size=50, on_batch=tell)


class Reducer:
    """Centre, then the leading principal directions, then length 1."""

    def __init__(self, points: Tensor, dim: int):
        self.mean = points.mean(dim=0)
        self.directions = torch.linalg.svd(points - self.mean, full_matrices=False).Vh[:dim].T

    def __call__(self, points: Tensor) -> Tensor:
        return F.normalize((points - self.mean) @ self.directions, dim=1)


# Training


def new_student() -> ViT:
    """Weights drawn from torch's global generator, and set free: a ViT is built frozen."""
    vit = ViT(NANO)
    for module in vit.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(vit.pos_embed, std=0.2)
    nn.init.trunc_normal_(vit.cls_token, std=0.2)
    return vit.requires_grad_(True)


def vary(pixels: Tensor, gen: Generator) -> Tensor:
    """Random crop, mirror, brightness, contrast, saturation and grey, each image its own: uint8 -> 0..1."""
    n, x = len(pixels), pixels.float() / 255
    if not n:
        return x
    scale = 1 - 0.3 * torch.rand(n, generator=gen)
    mirror = torch.where(torch.rand(n, generator=gen) < 0.5, 1.0, -1.0)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = scale * mirror, scale
    theta[:, :, 2] = (torch.rand(n, 2, generator=gen) * 2 - 1) * (1.1 - scale)[:, None]
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    brightness, contrast, saturation = 1 + 0.6 * (torch.rand(3, n, 1, 1, 1, generator=gen) - 0.5)
    grey = x.mean(dim=1, keepdim=True)
    x = grey + (x - grey) * saturation * (torch.rand(n, 1, 1, 1, generator=gen) > 0.1)
    level = x.mean(dim=(1, 2, 3), keepdim=True)
    return (level * brightness + (x - level) * contrast).clamp(0, 1)


class Lessons:
    """Batches of pictures [N, 3, 32, 32] in 0..1 and the vectors [N, D] that nano should give for them."""

    def __init__(self, args: argparse.Namespace, gen: Generator):
        self.gen = gen
        self.photos = {"procedural": 0, "distil": args.batch, "both": args.batch // 2}[args.recipe]
        self.glyphs = args.batch - self.photos
        self.only_teacher = args.recipe == "distil"
        self.images = read_cifar100(args.cifar, "train")[0][:PHOTOGRAPHS]
        pictures = torch.cat([self.images[:2000].float() / 255, random_glyphs(2000, gen)])
        self.reduce_edges = Reducer(edges(pictures), PARTS["edges"][0])
        self.reduce_layout = Reducer(layout(pictures), PARTS["layout"][0])
        self.embeddings = torch.zeros(len(self.images), PARTS["teacher"][0])
        if self.photos:
            embeddings = teacher_embeddings(args.teacher, self.images)
            self.embeddings = Reducer(embeddings, PARTS["teacher"][0])(embeddings)

    def draw(self) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, len(self.images), (self.photos,), generator=self.gen)
        photos, glyphs = vary(self.images[rows], self.gen), random_glyphs(self.glyphs, self.gen)
        no_embeddings = torch.zeros(self.glyphs, PARTS["teacher"][0])
        targets = [self._target(photos, self.embeddings[rows], 1), self._target(glyphs, no_embeddings, 2)]
        return torch.cat([photos, glyphs]), torch.cat(targets)

    def _target(self, pictures: Tensor, embeddings: Tensor, column: int) -> Tensor:
        """The three descriptions side by side, each with the length that PARTS gives it."""
        if not len(pictures):
            return torch.zeros(0, NANO.dim)
        parts = self.reduce_edges(edges(pictures)), self.reduce_layout(layout(pictures)), embeddings
        weights = [math.sqrt(part[column]) for part in PARTS.values()]
        if self.only_teacher:
            weights = [0.0, 0.0, 1.0]
        return torch.cat([weight * part for weight, part in zip(weights, parts, strict=True)], dim=1)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    vit, lessons = new_student(), Lessons(args, Generator().manual_seed(SEED + 1))
    matrices = [p for p in vit.parameters() if p.ndim in (2, 4)]
    vectors = [p for p in vit.parameters() if p.ndim not in (2, 4)]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))
    began = time.time()
    for step in range(args.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        pictures, targets = lessons.draw()
        agreement = F.cosine_similarity(vit((pictures - 0.5) / 0.5), targets, dim=1)
        optimiser.zero_grad()
        (1 - agreement.mean()).backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % 100 == 0:
            kinds = agreement.detach().split([lessons.photos, lessons.glyphs])
            pairs = zip(("photographs", "glyphs"), kinds, strict=True)
            reached = ", ".join(f"{part.mean():.3f} for {kind}" for kind, part in pairs if len(part))
            print(f"step {step + 1}: cosine to target {reached}, {time.time() - began:.0f} s", flush=True)
    state = {name: value.detach().half().contiguous() for name, value in vit.state_dict().items()}
    save_file(state, args.out, metadata={"protosteer": json.dumps(METADATA)})


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over 5 % of the steps, then a cosine down to a hundredth."""
    warm = max(1, steps // 20)
    if step < warm:
        return PEAK_RATE * (step + 1) / warm
    return PEAK_RATE * (0.01 + 0.99 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train nano, or measure it with --evaluate.")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="measure FILE instead of training")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the trained weights")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="cifar-100-python, with train, test and meta")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="MNIST's four .gz files (measuring only)")
    parser.add_argument("--notmnist", type=Path, metavar="DIR", help="notMNIST's test files (measuring only)")
    parser.add_argument("--digits", action="store_true", help="measure on scikit-learn's digits too")
    parser.add_argument("--pixels", action="store_true", help="measure raw pixels instead, for comparison")
    parser.add_argument("--teacher", type=Path, metavar="FILE", help="DeiT-Tiny as safetensors, timm's names")
    parser.add_argument("--recipe", choices=["procedural", "distil", "both"], default="both")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    if args.evaluate is None:
        if not (args.out and args.cifar) or (args.recipe != "procedural" and not args.teacher):
            raise SystemExit("training needs --out and --cifar, and --teacher unless --recipe procedural")
        train(args)
    print(json.dumps(evaluate(args.evaluate or args.out, args)))


if __name__ == "__main__":
    main()
