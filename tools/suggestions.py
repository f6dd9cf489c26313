"""What `protosteer suggest` is worth: accuracy over labels against random choice, wrong labels and copies found.

    python tools/suggestions.py measure cifar-100-python --classes 20 --backbone deit_tiny_patch16_224 \
        --keep deit.safetensors --out deit-20.json
    python tools/suggestions.py measure mnist --images 200 --test 100 --skip 300 --keep nano.safetensors --out mnist.json
    python tools/suggestions.py table *.json
    python tools/suggestions.py plot *.json --out docs/images/suggest.png

A model begins with a few images per class, the others have no labels. In each round some are labelled, the suggested
ones or random ones, and all that has a label is learned anew (`--preset instant`). Classes and first images are drawn
by the seed; test images come from the test split.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.errors import DataError
from protosteer.evaluation.manifest import circumstances
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.settings import Settings
from protosteer.tasks import learn_task
from protosteer.util.files import write_atomically
from protosteer.workflows.active_learning import Pool
from protosteer.workflows.duplicates import find_near_duplicates, thumbnails
from protosteer.workflows.label_issues import find_label_issues
from suggestion_report import plot, table
from unknowns import read

FLIPPED = 0.05  # the share of labels that are made wrong
BATCH = 50  # images embedded between two words about it


class Embedded:
    """Images whose embeddings are known; a `TrainingImages` of `paper.task` and an `Embed` of `paper.prompts`."""

    def __init__(self, embeddings: Tensor):
        self.embeddings = embeddings

    def embed(self, prompt: Tensor | None) -> Tensor:
        return self.embeddings

    def features(self, prompt: Tensor | None) -> Tensor:
        return self.embeddings[:, None]

    def views(self, batches: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        raise NotImplementedError("nothing is trained here")

    def __call__(self, rows: Tensor, prompts: Tensor | None) -> Tensor:
        return self.embeddings[rows]


def make_learner(backbone: Backbone, embeddings: Tensor, labels: Tensor) -> Learner:
    """Return a learner that has learned these images as one task."""
    learner = Learner(backbone, Settings.preset("instant"))
    classes = [f"{number:03}" for number in range(int(labels.max()) + 1)]
    images = Embedded(embeddings)
    learner.memory.add(learn_task("all", classes, images, labels, backbone, learner.memory, learner.settings))
    return learner


def predict(learner: Learner, embeddings: Tensor) -> Prediction:
    return learner.predict_embedded(Embedded(embeddings), len(embeddings))


# Rows [n] to label, of a learner and embeddings without labels [N, D].
Choose = Callable[[Learner, Tensor], Tensor]


def by_suggestion(count: int) -> Choose:
    def choose(learner: Learner, embeddings: Tensor) -> Tensor:
        pool = Pool.of([predict(learner, embeddings)])
        return torch.tensor(pool.informative_rows(range(len(embeddings)), count))

    return choose


def by_uncertainty(count: int) -> Choose:
    """Choose the most uncertain images, however similar they are: for comparison."""

    def choose(learner: Learner, embeddings: Tensor) -> Tensor:
        return Pool.of([predict(learner, embeddings)]).uncertainty.argsort(descending=True, stable=True)[:count]

    return choose


def by_chance(count: int, seed: int) -> Choose:
    draw = torch.Generator().manual_seed(seed)
    return lambda learner, embeddings: torch.randperm(len(embeddings), generator=draw)[:count]


class Trial:
    """The images of one seed: C classes, of which `start` images each have labels at first."""

    def __init__(self, embeddings: dict[str, Tensor], classes: int, start: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        class_rows = torch.randperm(len(embeddings["train"]), generator=draw)[:classes]
        self.train, self.test = embeddings["train"][class_rows], embeddings["test"][class_rows]  # [C, n, D]
        order = torch.stack([torch.randperm(self.train.shape[1], generator=draw) for _ in class_rows])
        self.train = self.train[torch.arange(classes)[:, None], order]
        self.start, self.seed = start, seed

    def curve(self, backbone: Backbone, choose: Choose, rounds: int) -> list[float]:
        """Return the percentage of test images correct, at first and after each round."""
        labelled, labels = _flat(self.train[:, : self.start])
        pool, pool_labels = _flat(self.train[:, self.start :])
        test, truth = _flat(self.test)
        accuracies: list[float] = []
        for turn in range(rounds + 1):
            learner = make_learner(backbone, labelled, labels)
            answers = predict(learner, test).scores.argmax(dim=1)
            accuracies.append(100 * float((answers == truth).double().mean()))
            if turn < rounds:
                rows = choose(learner, pool)
                labelled, labels = torch.cat([labelled, pool[rows]]), torch.cat([labels, pool_labels[rows]])
                is_left = torch.ones(len(pool), dtype=torch.bool).index_fill_(0, rows, False)
                pool, pool_labels = pool[is_left], pool_labels[is_left]
        return accuracies

    def wrong_labels(self) -> dict[str, float]:
        """Change some labels; count those among as many suggestions, and among twice as many."""
        embeddings, labels = _flat(self.train)
        draw, classes = torch.Generator().manual_seed(self.seed), len(self.train)
        wrong = torch.randperm(len(labels), generator=draw)[: round(FLIPPED * len(labels))]
        labels[wrong] = (labels[wrong] + torch.randint(1, classes, wrong.shape, generator=draw)) % classes
        hits = [
            d.row in set(wrong.tolist()) for d in find_label_issues(embeddings, [f"{n:03}" for n in labels.tolist()])
        ]
        count = len(wrong)
        shares = {"found": hits[:count], "found_in_twice": hits[: 2 * count], "doubted_at_all": hits}
        return {
            "wrong": count,
            "doubted": len(hits),
            **{k: 100 * sum(v) / count for k, v in shares.items()},
        }


def _flat(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten embeddings [C, n, D] to [C * n, D]; return them with their classes [C * n]."""
    classes, count, _ = embeddings.shape
    return embeddings.flatten(0, 1), torch.arange(classes).repeat_interleave(count)


def pictures(options: argparse.Namespace, split: str, per_class: int, skip: int = 0) -> Tensor:
    """Return images of the first classes after the first `skip` of each, uint8 [C, per_class, 3, h, w]."""
    images = read(options.folder, split)
    rows = []
    for name in images.classes[: options.first]:
        class_rows = [row for row, label in enumerate(images.labels) if label == name][skip : skip + per_class]
        if len(class_rows) < per_class:
            raise DataError(f"class '{name}' has {len(class_rows)} images after the first {skip}, not {per_class}")
        rows.append(images.pixels[class_rows])
    return torch.stack(rows)


def load_embeddings(options: argparse.Namespace, backbone: Backbone) -> dict[str, Tensor]:
    """Embed both splits, [C, n, D] each, or read them from the file that holds them."""
    if not options.keep.exists():
        embeddings = {}
        for split, per_class, skip in (("train", options.images, options.skip), ("test", options.test, 0)):
            pixels = pictures(options, split, per_class, skip)
            parts = []
            for batch in pixels.flatten(0, 1).split(BATCH):
                canvases = torch.stack([backbone.preprocessing.to_canvas(_picture(p)) for p in batch])
                parts.append(backbone.embed_pixels(canvases))
                print(f"{split}: {BATCH * len(parts)} of {per_class * len(pixels)}", end="\r", file=sys.stderr)
            embeddings[split] = torch.cat(parts).view(len(pixels), per_class, -1)
        save_file(embeddings, options.keep)
    return load_file(options.keep)


def _picture(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def _scaled(image: Image.Image, by: float) -> Image.Image:
    return image.resize((round(by * image.width), round(by * image.height)), Image.Resampling.BICUBIC)


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG, quality 75": lambda image: _jpeg(image, 75),
    "JPEG, quality 40": lambda image: _jpeg(image, 40),
    "three times as large, JPEG 60": lambda image: _jpeg(_scaled(image, 3), 60),
    "half as large": lambda image: _scaled(image, 0.5),
    "a sixteenth cut off two sides": lambda image: image.crop(
        (image.width // 16, image.height // 16, image.width, image.height)
    ),
}


def copies(options: argparse.Namespace, backbone: Backbone) -> dict[str, Any]:
    """Measure the percentage of copies found, and how many pictures are classified as copies of another."""
    images = [_picture(p) for p in pictures(options, "test", options.test).flatten(0, 1)]

    def to_thumbnails(edited: Sequence[Image.Image]) -> Tensor:
        canvas = backbone.preprocessing.to_canvas
        return torch.cat([thumbnails(canvas(image)[None]) for image in edited])

    originals = to_thumbnails(images)
    duplicates = find_near_duplicates(originals)
    shares = {}
    for name, change in COPIES.items():
        pairs = torch.stack([originals, to_thumbnails([change(image) for image in images])], dim=1)
        shares[name] = 100 * fmean(len(find_near_duplicates(pair)) for pair in pairs)
    return {"pictures": len(images), "taken_for_copies": len(duplicates), "found": shares}


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    backbone = Backbone.load(options.backbone, weights=options.weights)
    embeddings = load_embeddings(options, backbone)
    seeds, classes = range(options.seeds), options.classes or len(embeddings["train"])
    curves: dict[str, list[list[float]]] = {"suggested": [], "most in doubt": [], "random": []}
    wrong_labels = []
    for seed in seeds:
        trial = Trial(embeddings, classes, options.start, seed)
        ways = (by_suggestion(options.count), by_uncertainty(options.count), by_chance(options.count, seed))
        for (name, seed_curves), choose in zip(curves.items(), ways, strict=True):
            seed_curves.append(trial.curve(backbone, choose, options.rounds))
            print(f"seed {seed}, {name}: {' '.join(f'{a:.1f}' for a in seed_curves[-1])}", file=sys.stderr)
        wrong_labels.append(trial.wrong_labels())
    paths = ("folder", "weights", "keep", "out", "command", "work")
    arguments = {name: value for name, value in vars(options).items() if name not in paths}
    figures = {
        "data": options.folder.name,
        **arguments,
        "classes": classes,
        "curves": curves,
        "wrong_labels": wrong_labels,
        "copies": copies(options, backbone),
        "fingerprint": backbone.fingerprint,
        "circumstances": circumstances(backbone.device),
    }
    write_atomically(options.out, json.dumps(figures, indent=1).encode())


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure", help="make a model learn, round after round")
    command.add_argument("folder", type=Path, help="with CIFAR-100, or with idx files")
    command.add_argument("--first", type=int, help="so many classes of the set alone, by number (default: all)")
    command.add_argument("--classes", type=int, help="so many of these, drawn by the seed (default: all)")
    command.add_argument("--start", type=int, default=3, help="images per class that have labels at first")
    command.add_argument("--images", type=int, default=50, help="training images per class, these included")
    command.add_argument("--skip", type=int, default=0, help="training images per class before them")
    command.add_argument("--test", type=int, default=20, help="test images per class")
    command.add_argument("--count", type=int, default=50, help="labels in a round")
    command.add_argument("--rounds", type=int, default=6)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--backbone", default="nano")
    command.add_argument("--weights", type=Path)
    command.add_argument("--keep", type=Path, required=True, help="file where embeddings are, or will be")
    command.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    command.set_defaults(work=measure)
    several = commands.add_parser("table", help="figures of several runs as Markdown")
    several.add_argument("results", type=Path, nargs="+")
    several.set_defaults(work=table)
    picture = commands.add_parser("plot", help="accuracy over labels")
    picture.add_argument("results", type=Path, nargs="+")
    picture.add_argument("--out", type=Path, required=True, help="PNG file")
    picture.set_defaults(work=plot)
    return root


if __name__ == "__main__":
    options = parser().parse_args()
    options.work(options)
