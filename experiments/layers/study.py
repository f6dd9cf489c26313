"""Measure the classifier of `reference.py` beside NCM, SLDA, RanPAC and LayUP, on cached features of a frozen ViT.

    python experiments/layers/study.py features mini cifar100 learned.safetensors --data-dir data --last 20
    python experiments/layers/study.py evaluate learned.safetensors heldout.safetensors --methods ours,ncm

`features` draws images `first` to `last` of each class in a fixed random order: disjoint ranges share no image.
Without `--last`, all images are used, in file order. `evaluate` prints results as JSON; "a+b" joins two caches.
"""

from __future__ import annotations

import ast
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import reference
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.class_folders import read_folder
from protosteer.data.datasets.base import Reading
from protosteer.data.datasets.registry import DATASETS, open_dataset

SIDE = 256  # pixels of images from class folders, before the backbone's preprocessing
LAYUP_LAYERS = 6
LAMBDAS = [10.0**power for power in range(-8, 9)]
# "tokens" [N, depth, 2, D]: class tokens, patch means; "embedding" [N, D]; "labels" [N]; "pooled" [N]: 1 for mean pooling
Features = dict[str, Tensor]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def features(
    backbone: str, data: str, out: Path, weights: Path | None = None, crop: float | None = None,
    data_dir: Path | None = None, split: str = "train", first: int = 0, last: int | None = None,
) -> None:  # fmt: skip
    """Cache class tokens and patch means of every layer; DATA is a data set's name or a folder of class folders."""
    model = Backbone.load(backbone, weights=weights, crop=crop)
    if data in DATASETS:
        part = getattr(open_dataset(data, data_dir, Reading(model.preprocessing)), split)
        generator = torch.Generator().manual_seed(0)
        classes = [(part.labels == label).nonzero()[:, 0] for label in range(int(part.labels.max()) + 1)]
        draws = [rows[torch.randperm(len(rows), generator=generator)][first:last] for rows in classes]
        rows = torch.cat(draws) if last else torch.arange(len(part.labels))
        pixels, labels = part.images.pixels(rows.tolist()), part.labels[rows]
    else:
        pixels, labels = read_folder_images(Path(data), first, last)
    cache = compute_features(model, pixels)
    cache |= {"labels": labels, "pooled": torch.full_like(labels, int(model.vit.config.pool == "mean"))}
    origin = f"{model.name} {model.fingerprint}, {Path(data).name} {split} {first}:{last}"
    save_file(cache, out, {"origin": origin})
    print(f"{out}: {len(labels)} images, {origin}")


def read_folder_images(folder: Path, first: int, last: int | None) -> tuple[Tensor, Tensor]:
    """Read images `first` to `last` of each class folder, in a random order: uint8 [N, 3, SIDE, SIDE], labels [N]."""
    files, shuffler = read_folder(folder), random.Random(0)
    pixels, labels = [], []
    for label, name in enumerate(sorted(set(files.labels))):
        paths = [path for path, owner in zip(files.paths, files.labels, strict=True) if owner == name]
        shuffler.shuffle(paths)
        pixels += [read_square(path) for path in paths[first:last]]
        labels += [label] * len(paths[first:last])
    return torch.stack(pixels), torch.tensor(labels)


def read_square(path: Path) -> Tensor:
    """Read an image file, scale its shorter side to `SIDE` and crop the centre, uint8 [3, SIDE, SIDE]."""
    with Image.open(path) as file:
        image = file.convert("RGB")
    width, height = (max(SIDE, round(length * SIDE / min(image.size))) for length in image.size)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image.crop((left, top, left + SIDE, top + SIDE)))).permute(2, 0, 1)


@torch.no_grad()
def compute_features(model: Backbone, pixels: Tensor) -> Features:
    """Compute the "tokens" and "embedding" of pixels [N, 3, h, w] with one forward pass each."""
    vit, tokens, embedding = model.vit, [], []
    for batch in pixels.split(model.batch_size(64)):
        x, layers = vit.embed_patches(model.preprocessing(batch)), []
        for block in vit.blocks:
            x = block(x)
            layers.append(torch.stack([x[:, 0], x[:, -vit.config.patches :].mean(dim=1)], dim=1))
        tokens.append(torch.stack(layers, dim=1).half())
        embedding.append(vit.pool(x))
    return {"tokens": torch.cat(tokens), "embedding": torch.cat(embedding)}


@app.command()
def evaluate(
    train: str, test: str, methods: str = "ours", per_class: int | None = None, projections: int = 2000,
    constant: list[str] = [],  # noqa: B006
) -> None:  # fmt: skip
    """Fit METHODS (ours, ncm, slda, ranpac, layup) and print their accuracy; --constant NAME=VALUE changes `reference`."""
    for name, value in (text.split("=") for text in constant):
        setattr(reference, name, type(getattr(reference, name))(ast.literal_eval(value)))
    torch.set_num_threads(1)
    learned, heldout = load_features(train, per_class), load_features(test)
    y, x, query, labels = learned["labels"], learned["embedding"], heldout["embedding"], heldout["labels"]
    matrix = torch.randn(x.shape[1], projections, generator=torch.Generator().manual_seed(0))
    tokens = [cache["tokens"][:, -LAYUP_LAYERS:, 0].float() for cache in (learned, heldout)]
    stacks = [F.layer_norm(part, part.shape[-1:]).flatten(1) for part in tokens]
    scorers = {
        "ncm": lambda: F.normalize(query) @ F.normalize(class_means(F.normalize(x), y)).T,
        "slda": lambda: slda(x.double(), y, query.double()),
        "ranpac": lambda: ridge((x @ matrix).relu(), y, (query @ matrix).relu()),
        "layup": lambda: ridge(stacks[0], y, stacks[1]),
    }
    row: dict[str, Any] = {}
    for method in methods.split(","):
        row |= ours(learned, heldout) if method == "ours" else {method: accuracy(scorers[method](), labels)}
    print(json.dumps(json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 3))))


def load_features(paths: str, per_class: int | None = None) -> Features:
    """Join cached features, and keep the first `per_class` images of each class."""
    parts = [load_file(path) for path in paths.split("+")]
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    labels = joined["labels"]
    rows = [(labels == label).nonzero()[:per_class, 0] for label in range(int(labels.max()) + 1)]
    return {key: value[torch.cat(rows)] for key, value in joined.items()}


def ours(learned: Features, heldout: Features) -> dict[str, Any]:
    """Fit the classifier of `reference.py` and measure it; "loo" is the accuracy of leave-one-out."""
    (x, similar), (query, _), y = feature_spaces(learned), feature_spaces(heldout), learned["labels"]
    start = time.perf_counter()
    summaries = [reference.summarise_class(x[y == label], seed=label) for label in range(int(y.max()) + 1)]
    classifier = reference.LayerClassifier(summaries, similar)
    seconds = time.perf_counter() - start
    logits, labels = torch.cat([classifier.logits(part) for part in query.split(2000)]), heldout["labels"]
    return {
        "ours": accuracy(logits, labels), "ece": calibration_error(logits, labels),
        "nll": float(F.cross_entropy(logits, labels)), "seconds": seconds, "scale": classifier.scale,
        "loo": accuracy(classifier.loo_logits(), classifier.loo_labels), "shares": classifier.shares.tolist(),
        "kB": sum(summary.byte_count for summary in summaries) / len(summaries) / 1000,
    }  # fmt: skip


def feature_spaces(cache: Features) -> tuple[Tensor, int]:
    """Return unit features [N, S, D] and how many spaces are pooled like the output; these come first."""
    tokens, pooled = cache["tokens"].float(), int(cache["pooled"][0])
    similar, others = reference.feature_layers(tokens.shape[1])
    spaces = [F.normalize(cache["embedding"].double(), dim=-1)]
    spaces += [reference.unit_features(tokens[:, layer - 1, pooled]) for layer in similar[1:]]
    spaces += [reference.unit_features(tokens[:, layer - 1, 1 - pooled]) for layer in others]
    return torch.stack(spaces, dim=1).float(), len(similar)


def class_means(x: Tensor, y: Tensor) -> Tensor:
    """Average x [N, D] by class, [C, D]."""
    return F.one_hot(y).to(x).T @ x / torch.bincount(y)[:, None]


def slda(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """Score by linear discriminants with a shared covariance, shrunk by 1e-4."""
    means = class_means(x, y)
    covariance = (x - means[y]).T @ (x - means[y]) / len(x)
    weights = means @ torch.linalg.inv((1 - 1e-4) * covariance + 1e-4 * torch.eye(len(covariance)))
    return query @ weights.T - 0.5 * (weights * means).sum(dim=1)


def ridge(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """Score by ridge regression of one-hot labels; a random fifth of the images selects lambda."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, targets, fifth = x[order].double(), F.one_hot(y[order]).double(), len(y) // 5
    gram, cross = x[fifth:].T @ x[fifth:], x[fifth:].T @ targets[fifth:]
    values, vectors = torch.linalg.eigh(gram)
    turned, held = vectors.T @ cross, x[:fifth] @ vectors
    errors = [(held @ (turned / (values + a)[:, None]) - targets[:fifth]).square().mean() for a in LAMBDAS]
    strength = LAMBDAS[int(torch.stack(errors).argmin())]
    return query.double() @ torch.linalg.solve(x.T @ x + strength * torch.eye(len(gram)), x.T @ targets)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the top-1 accuracy in percent."""
    return 100 * float((logits.argmax(dim=1) == labels).double().mean())


def calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error in percent."""
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    gaps = (predicted == labels).double() - confidence
    sums = torch.zeros(bins, dtype=torch.double).index_add_(0, (confidence * bins).ceil().long() - 1, gaps)
    return 100 * float(sums.abs().sum()) / len(labels)


if __name__ == "__main__":
    app()
