"""How good a small backbone is for teaching, as its model card tells it.

    python tools/mini_scores.py --backbone mini --cifar DIR --mnist DIR --notmnist DIR --folders pets --out scores.json
    python tools/mini_scores.py --backbone mini --speed --teacher deit_tiny_patch16_224.safetensors

Every seed draws its own images. A set is learned task after task, in three ways: by class means, by the preset
`instant`, and by `best`, which trains a prompt per task. Figures are percent right among all classes, after the
last task. For `best` and the same classes: percent right among the classes of the image's own task, by the
nearest centroid, with the task's prompt and without.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from mini_data import read_photo
from pretrain_nano import read_mnist
from protosteer.backbones import Backbone
from protosteer.bench.harness import interleaved
from protosteer.data.datasets.cifar import read_cifar100
from protosteer.data.images import ArrayImages
from protosteer.evaluation.protocol import run_stream
from protosteer.methods.cpp import CPP
from protosteer.methods.protosteer import Protosteer
from protosteer.rules import RULES
from protosteer.settings import Settings
from protosteer.streams import split_digits
from protosteer.streams.base import Stream, Task
from protosteer.util.files import write_atomically

WAYS: dict[str, tuple[type[CPP], Settings]] = {
    "class means": (CPP, Settings.preset("paper", prompts=False, centroids=1)),
    "instant": (Protosteer, Settings.preset("instant")),
    "best": (Protosteer, Settings.preset("best")),
}
Part = tuple[Tensor, Tensor]  # pixels uint8 [N, 3, h, w] and the numbers of their classes


@dataclass(frozen=True)
class Drawing:
    """A data set, and how many images of each class a seed draws for learning and for testing."""

    read: Callable[[], tuple[Part, Part]]
    learned: int
    tested: int
    tasks: int
    classes: int

    def stream(self, name: str, seed: int) -> Stream:
        gen = Generator().manual_seed(seed)
        parts = zip(self.read(), (self.learned, self.tested), strict=True)
        rows = [(pixels, draw_rows(labels, self.classes, count, gen)) for (pixels, labels), count in parts]
        tasks = []
        for i, numbers in enumerate(torch.arange(self.classes).chunk(self.tasks), 1):
            images: list[Any] = []
            for pixels, by_class in rows:
                images += [ArrayImages(pixels[by_class[numbers].flatten()])]
                images += [[str(c) for c in numbers.tolist() for _ in range(by_class.shape[1])]]
            tasks.append(Task(f"task-{i}", [str(c) for c in numbers.tolist()], *images))
        return Stream(name, tasks)


def draw_rows(labels: Tensor, classes: int, count: int, gen: Generator) -> Tensor:
    """Draw distinct rows [classes, count]."""
    owned = [(labels == c).nonzero().squeeze(1) for c in range(classes)]
    return torch.stack([rows[torch.randperm(len(rows), generator=gen)[:count]] for rows in owned])


def drawings(args: argparse.Namespace) -> dict[str, Drawing]:
    """Return the drawings of all data sets in the arguments."""
    sets = {}
    if args.cifar:
        sets["cifar100"] = Drawing(lambda: cifar(args.cifar), 20, 10, 10, 100)
        sets["cifar100_first10"] = Drawing(lambda: cifar(args.cifar), 20, 100, 2, 10)
    if args.mnist:
        sets["mnist"] = Drawing(lambda: (grey(args.mnist, "train"), grey(args.mnist, "t10k")), 100, 200, 5, 10)
    if args.notmnist:
        sets["notmnist"] = Drawing(lambda: halves(grey(args.notmnist, "t10k")), 100, 200, 5, 10)
    for folder in args.folders:
        part = photographs(folder)
        sets[folder.name] = Drawing(partial(halves, part), 15, 15, 10, int(part[1].max()) + 1)
    return sets


def photographs(folder: Path) -> Part:
    """Read photographs of classes with at least 30, an even number of each class, so that halves have equal sizes."""
    classes = [sorted(c.iterdir()) for c in sorted(folder.iterdir()) if c.is_dir()]
    files = [paths[: len(paths) // 2 * 2] for paths in classes if len(paths) >= 30]
    pixels = np.stack([read_photo(file) for paths in files for file in paths])
    return torch.from_numpy(pixels), torch.arange(len(files)).repeat_interleave(torch.tensor([len(p) for p in files]))


def cifar(folder: Path) -> tuple[Part, Part]:
    train, test = (read_cifar100(folder, split)[:2] for split in ("train", "test"))
    return train, test


def grey(folder: Path, split: str) -> Part:
    pixels, labels = read_mnist(folder, split)
    return pixels, torch.tensor([int(label) for label in labels])


def halves(part: Part) -> tuple[Part, Part]:
    """Split a data set without a test set into two halves."""
    pixels, labels = part
    return (pixels[::2], labels[::2]), (pixels[1::2], labels[1::2])


def score(backbone: Backbone, stream: Stream, ways: Sequence[str]) -> dict[str, float]:
    """Return the accuracy of each way in percent, and what prompts do for images whose task is known."""
    scores: dict[str, float] = {}
    for way in ways:
        kind, settings = WAYS[way]
        method = kind(backbone, settings)
        scores[way] = run_stream(method, stream, diagnosed=False).figures()["last_image_accuracy"]
        if settings.prompts:
            scores |= true_task(method, stream)
    return scores


def true_task(method: CPP, stream: Stream) -> dict[str, float]:
    """Average the paper's diagnosis over tasks, whatever the method's rule."""
    learner, number, diagnoses = method.learner, {c: k for k, c in enumerate(method.classes)}, []
    reader = RULES["paper"].reader(learner.memory, learner.settings)
    for j, task in enumerate(stream):
        keys = learner.backbone.embed_set(task.test)
        values = learner.backbone.embed_set(task.test, learner.memory.tasks[j].prompt)

        def embed(rows: Tensor, numbers: Tensor | None, keys: Tensor = keys, values: Tensor = values) -> Tensor:
            return keys[rows] if numbers is None else values[rows]

        truth = torch.tensor([number[label] for label in task.test_labels])
        record = learner.memory.tasks[j]
        classes = torch.tensor([number[name] for name in record.class_names])
        diagnoses.append(reader.diagnose(embed, truth, j, classes))
    kinds = ("true_task_with_prompt", "true_task_without_prompt")
    return {kind: mean(figures[kind] for figures in diagnoses) for kind in kinds}


def speed(backbones: dict[str, Backbone], images: int, repeats: int) -> dict[str, float]:
    """Return images per second of each backbone, by the median; all run in turns."""
    gen = Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, 64, 64), generator=gen, dtype=torch.uint8)
    sides = {name: lambda b=backbone: b.embed_pixels(pixels) for name, backbone in backbones.items()}
    return {name: images / median(times) for name, times in interleaved(sides, repeats).items()}


def summary(seeds: list[dict[str, float]]) -> dict[str, Any]:
    kinds = seeds[0]
    return {
        "mean": {kind: round(mean(s[kind] for s in seeds), 2) for kind in kinds},
        "std": {kind: round(stdev([s[kind] for s in seeds]), 2) for kind in kinds if len(seeds) > 1},
        "seeds": seeds,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score a small backbone, or measure speed.")
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--weights", type=Path, metavar="FILE")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="cifar-100-python")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="MNIST's four .gz files")
    parser.add_argument("--notmnist", type=Path, metavar="DIR", help="notMNIST's test files")
    parser.add_argument("--folders", type=Path, nargs="*", default=[], metavar="DIR", help="with a folder per class")
    parser.add_argument("--digits", action="store_true", help="scikit-learn's digits, one split for all seeds")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="only these of the sets, as they are printed")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--speed", action="store_true", help="measure speed instead, beside nano's")
    parser.add_argument("--teacher", type=Path, metavar="FILE", help="DeiT-Tiny, beside --speed")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    load = partial(Backbone.load, precision=args.precision)
    backbone = load(args.backbone, weights=args.weights)
    if args.speed:
        backbones = {"nano": load("nano"), args.backbone: backbone}
        if args.teacher:
            backbones["deit_tiny"] = load("deit_tiny_patch16_224", weights=args.teacher)
        return {"images_per_second": {k: round(v, 1) for k, v in speed(backbones, 64, 5).items()}}
    results: dict[str, Any] = {"backbone": backbone.describe()}
    for name, drawing in drawings(args).items():
        if args.sets and name not in args.sets:
            continue
        scored = [score(backbone, drawing.stream(name, seed), args.ways) for seed in args.seeds]
        results[name] = summary(scored)
        print(name, json.dumps(results[name]["mean"]), flush=True)
    if args.digits:
        results["digits"] = summary([score(backbone, split_digits(), args.ways)])
        print("digits", json.dumps(results["digits"]["mean"]), flush=True)
    return results


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    results = measure(args)
    if args.out:
        write_atomically(args.out, json.dumps(results, indent=2).encode() + b"\n")
    else:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
