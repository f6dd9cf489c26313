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
from protosteer.workflows.active_learning import Pool, near_duplicates, thumbnails
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

    def views(self, batches: Sequence[Tensor]) -> list[Tensor]:
        raise NotImplementedError("nothing is trained here")

    def __call__(self, rows: Tensor, prompts: Tensor | None) -> Tensor:
        return self.embeddings[rows]


def learned(backbone: Backbone, embeddings: Tensor, labels: Tensor) -> Learner:
    """A learner that was taught these images as one task."""
    learner = Learner(backbone, Settings.preset("instant"))
    classes = [f"{number:03}" for number in range(int(labels.max()) + 1)]
    images = Embedded(embeddings)
    learner.memory.add(learn_task("all", classes, images, labels, backbone, learner.memory, learner.settings))
    return learner


def predicted(learner: Learner, embeddings: Tensor) -> Prediction:
    return learner.predict_embedded(Embedded(embeddings), len(embeddings))


# Rows [n] to label, of a learner and embeddings without labels [N, D].
Choose = Callable[[Learner, Tensor], Tensor]


def suggested(count: int) -> Choose:
    def choose(learner: Learner, embeddings: Tensor) -> Tensor:
        pool = Pool.of([predicted(learner, embeddings)])
        return torch.tensor(pool.informative_rows(range(len(embeddings)), count))

    return choose


def most_in_doubt(count: int) -> Choose:
    """For comparison: doubt alone, however much alike the images are."""

    def choose(learner: Learner, embeddings: Tensor) -> Tensor:
        return Pool.of([predicted(learner, embeddings)]).uncertainty.argsort(descending=True, stable=True)[:count]

    return choose


def at_random(count: int, seed: int) -> Choose:
    draw = torch.Generator().manual_seed(seed)
    return lambda learner, embeddings: torch.randperm(len(embeddings), generator=draw)[:count]


class Trial:
    """The images of one seed: C classes, of which `start` images each have labels at first."""

    def __init__(self, kept: dict[str, Tensor], classes: int, start: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        some = torch.randperm(len(kept["train"]), generator=draw)[:classes]
        self.train, self.test = kept["train"][some], kept["test"][some]  # [C, n, D]
        order = torch.stack([torch.randperm(self.train.shape[1], generator=draw) for _ in some])
        self.train = self.train[torch.arange(classes)[:, None], order]
        self.start, self.seed = start, seed

    def curve(self, backbone: Backbone, choose: Choose, rounds: int) -> list[float]:
        """Percent of the test images right, at first and after each round."""
        known, labels = _flat(self.train[:, : self.start])
        rest, hidden = _flat(self.train[:, self.start :])
        test, truth = _flat(self.test)
        found: list[float] = []
        for turn in range(rounds + 1):
            learner = learned(backbone, known, labels)
            answers = predicted(learner, test).scores.argmax(dim=1)
            found.append(100 * float((answers == truth).double().mean()))
            if turn < rounds:
                rows = choose(learner, rest)
                known, labels = torch.cat([known, rest[rows]]), torch.cat([labels, hidden[rows]])
                left = torch.ones(len(rest), dtype=torch.bool).index_fill_(0, rows, False)
                rest, hidden = rest[left], hidden[left]
        return found

    def wrong_labels(self) -> dict[str, float]:
        """Some labels are made wrong: how many of them stand among as many suggestions, and among twice as many."""
        embeddings, labels = _flat(self.train)
        draw, classes = torch.Generator().manual_seed(self.seed), len(self.train)
        wrong = torch.randperm(len(labels), generator=draw)[: round(FLIPPED * len(labels))]
        labels[wrong] = (labels[wrong] + torch.randint(1, classes, wrong.shape, generator=draw)) % classes
        hits = [
            d.row in set(wrong.tolist()) for d in find_label_issues(embeddings, [f"{n:03}" for n in labels.tolist()])
        ]
        many = len(wrong)
        shares = {"found": hits[:many], "found_in_twice": hits[: 2 * many], "doubted_at_all": hits}
        return {
            "wrong": many,
            "doubted": len(hits),
            **{k: 100 * sum(v) / many for k, v in shares.items()},
        }


def _flat(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [C, n, D] one after the other, and their classes."""
    classes, count, _ = embeddings.shape
    return embeddings.flatten(0, 1), torch.arange(classes).repeat_interleave(count)


def pictures(given: argparse.Namespace, split: str, each: int, skip: int = 0) -> Tensor:
    """uint8 [C, each, 3, h, w]: of the first classes, after the first `skip` images of each."""
    images = read(given.folder, split)
    rows = []
    for name in images.classes[: given.first]:
        own = [row for row, label in enumerate(images.labels) if label == name][skip : skip + each]
        if len(own) < each:
            raise DataError(f"class '{name}' has {len(own)} images after the first {skip}, not {each}")
        rows.append(images.pixels[own])
    return torch.stack(rows)


def embedded(given: argparse.Namespace, backbone: Backbone) -> dict[str, Tensor]:
    """Embeddings [C, n, D] of both splits; kept in a file."""
    if not given.keep.exists():
        found = {}
        for split, each, skip in (("train", given.images, given.skip), ("test", given.test, 0)):
            pixels = pictures(given, split, each, skip)
            parts = []
            for some in pixels.flatten(0, 1).split(BATCH):
                canvases = torch.stack([backbone.preprocessing.to_canvas(_picture(p)) for p in some])
                parts.append(backbone.embed_pixels(canvases))
                print(f"{split}: {BATCH * len(parts)} of {each * len(pixels)}", end="\r", file=sys.stderr)
            found[split] = torch.cat(parts).view(len(pixels), each, -1)
        save_file(found, given.keep)
    return load_file(given.keep)


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


def copies(given: argparse.Namespace, backbone: Backbone) -> dict[str, Any]:
    """Percent of copies found, and how many of the pictures themselves are taken for copies of another."""
    images = [_picture(p) for p in pictures(given, "test", given.test).flatten(0, 1)]

    def small(changed: Sequence[Image.Image]) -> Tensor:
        canvas = backbone.preprocessing.to_canvas
        return torch.cat([thumbnails(canvas(image)[None]) for image in changed])

    own = small(images)
    taken = near_duplicates(own)
    found = {}
    for name, change in COPIES.items():
        both = torch.stack([own, small([change(image) for image in images])], dim=1)
        found[name] = 100 * fmean(len(near_duplicates(pair)) for pair in both)
    return {"pictures": len(images), "taken_for_copies": len(taken), "found": found}


def measure(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    backbone = Backbone.load(given.backbone, weights=given.weights)
    kept = embedded(given, backbone)
    seeds, classes = range(given.seeds), given.classes or len(kept["train"])
    curves: dict[str, list[list[float]]] = {"suggested": [], "most in doubt": [], "random": []}
    wrong = []
    for seed in seeds:
        trial = Trial(kept, classes, given.start, seed)
        ways = (suggested(given.count), most_in_doubt(given.count), at_random(given.count, seed))
        for (name, found), choose in zip(curves.items(), ways, strict=True):
            found.append(trial.curve(backbone, choose, given.rounds))
            print(f"seed {seed}, {name}: {' '.join(f'{a:.1f}' for a in found[-1])}", file=sys.stderr)
        wrong.append(trial.wrong_labels())
    asked = {k: v for k, v in vars(given).items() if k not in ("folder", "weights", "keep", "out", "command", "work")}
    figures = {
        "data": given.folder.name,
        **asked,
        "classes": classes,
        "curves": curves,
        "wrong_labels": wrong,
        "copies": copies(given, backbone),
        "fingerprint": backbone.fingerprint,
        "circumstances": circumstances(backbone.device),
    }
    write_atomically(given.out, json.dumps(figures, indent=1).encode())


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = whole.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="make a model learn, round after round")
    one.add_argument("folder", type=Path, help="with CIFAR-100, or with idx files")
    one.add_argument("--first", type=int, help="so many classes of the set alone, by number (default: all)")
    one.add_argument("--classes", type=int, help="so many of these, drawn by the seed (default: all)")
    one.add_argument("--start", type=int, default=3, help="images per class that have labels at first")
    one.add_argument("--images", type=int, default=50, help="training images per class, these included")
    one.add_argument("--skip", type=int, default=0, help="training images per class before them")
    one.add_argument("--test", type=int, default=20, help="test images per class")
    one.add_argument("--count", type=int, default=50, help="labels in a round")
    one.add_argument("--rounds", type=int, default=6)
    one.add_argument("--seeds", type=int, default=3)
    one.add_argument("--backbone", default="nano")
    one.add_argument("--weights", type=Path)
    one.add_argument("--keep", type=Path, required=True, help="file where embeddings are, or will be")
    one.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    one.set_defaults(work=measure)
    several = commands.add_parser("table", help="figures of several runs as Markdown")
    several.add_argument("results", type=Path, nargs="+")
    several.set_defaults(work=table)
    picture = commands.add_parser("plot", help="accuracy over labels")
    picture.add_argument("results", type=Path, nargs="+")
    picture.add_argument("--out", type=Path, required=True, help="PNG file")
    picture.set_defaults(work=plot)
    return whole


if __name__ == "__main__":
    given = parser().parse_args()
    given.work(given)
