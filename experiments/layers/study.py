"""Measure the default classifier beside NCM, SLDA, RanPAC and LayUP, on cached features of a frozen ViT.

    python experiments/layers/study.py features mini cifar100 learned.safetensors --data-dir data --last 20
    python experiments/layers/study.py evaluate learned.safetensors heldout.safetensors --methods ours,ncm
    python experiments/layers/study.py plot few-and-many.png mini=results.jsonl

`features` draws images `first` to `last` of each class in a fixed random order: disjoint ranges share no image.
Without `--last`, all images are used, in file order. `evaluate` prints results as JSON; "a+b" joins two caches.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.layer_features import feature_spaces
from protosteer.data.class_folders import read_folder
from protosteer.data.datasets.base import Reading
from protosteer.data.datasets.registry import DATASETS, open_dataset
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.paper.vit import ViTConfig
from protosteer.rules import RULES, Embeddings, reader_of
from protosteer.settings import Settings

SIDE = 256  # pixels of images from class folders, before the backbone's preprocessing
LAYUP_LAYERS = 6
LAMBDAS = [10.0**power for power in range(-8, 9)]
# "tokens" [N, depth, 2, D]: class tokens, patch means; "embedding" [N, D]; "labels" [N]; "pooled" [N]: 1 for mean pooling
Features = dict[str, Tensor]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def features(
    backbone: str, data: str, out: Path, weights: Path | None = None, crop: float | None = None,
    data_dir: Path | None = None, split: str = "train", first: int = 0, last: int | None = None, precision: str = "fp32",
) -> None:  # fmt: skip
    """Cache class tokens and patch means of every layer; DATA is a data set's name or a folder of class folders."""
    model = Backbone.load(backbone, weights=weights, crop=crop, precision=precision)
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
    origin = f"{model.name} {model.fingerprint}, {precision}, {Path(data).name} {split} {first}:{last}"
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
        with torch.autocast("cpu", torch.bfloat16, enabled=model.precision == "bf16"):
            x, layers = vit.embed_patches(model.preprocessing(batch)), []
            for block in vit.blocks:
                x = block(x)
                layers.append(torch.stack([x[:, 0], x[:, -vit.config.patches :].mean(dim=1)], dim=1))
            tokens.append(torch.stack(layers, dim=1).half())
            embedding.append(vit.pool(x).float())
    return {"tokens": torch.cat(tokens), "embedding": torch.cat(embedding)}


@app.command()
def evaluate(
    train: str, test: str, methods: str = "ours", per_class: int | None = None, projections: int = 2000,
    tasks: int = 10,
) -> None:  # fmt: skip
    """Fit METHODS (ours, last-layer, ncm, slda, ranpac, layup) and print their accuracy; ours learns in TASKS tasks."""
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
    row: dict[str, Any] = {"train": train, "test": test, "per_class": per_class}
    for method in methods.split(","):
        if method in scorers:
            row[method] = accuracy(scorers[method](), labels)
        else:
            layers = "several" if method == "ours" else "last"
            row |= {f"{method}{key}": value for key, value in ours(learned, heldout, layers, tasks).items()}
    print(json.dumps(json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 3))))


@app.command()
def plot(out: Path, results: list[str]) -> None:
    """Draw accuracy against images per class; RESULTS are TITLE=FILE, of lines that `evaluate --per-class` printed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {"ncm": "NCM", "slda": "SLDA", "layup": "LayUP", "ranpac": "RanPAC", "ours": "protosteer, instant"}
    size = (4.8 * len(results), 4.0)
    figure, panels = plt.subplots(1, len(results), figsize=size, layout="constrained", squeeze=False)
    for axes, (title, _, file) in zip(panels[0], (text.partition("=") for text in results), strict=True):
        rows: dict[int, dict[str, float]] = {}
        for row in map(json.loads, Path(file).read_text().splitlines()):
            rows.setdefault(row["per_class"], {}).update(row)
        count = sorted(rows)
        for method, label in names.items():
            percent = [rows[number][method] for number in count]
            axes.plot(count, percent, "o-", label=label, linewidth=2.4 if method == "ours" else 1.2, markersize=4)
        axes.set(xscale="log", xlabel="training images per class", ylabel="accuracy, %", title=title)
        axes.set_xticks(count, [str(number) for number in count])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0, -1].legend(loc="lower right")
    figure.savefig(out, dpi=150)


def load_features(paths: str, per_class: int | None = None) -> Features:
    """Join cached features, and keep the first `per_class` images of each class."""
    parts = [load_file(path) for path in paths.split("+")]
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    labels = joined["labels"]
    rows = [(labels == label).nonzero()[:per_class, 0] for label in range(int(labels.max()) + 1)]
    return {key: value[torch.cat(rows)] for key, value in joined.items()}


def ours(learned: Features, heldout: Features, layers: str, tasks: int) -> dict[str, float]:
    """Learn and predict by the default classifier with nothing trained; "_loo" is the accuracy of leave-one-out."""
    x, query, y, labels = spaces(learned), spaces(heldout), learned["labels"], heldout["labels"]
    if layers == "last":
        x, query = x[:, :1], query[:, :1]
    settings, rule, memory = Settings.preset("instant", feature_layers=layers), RULES["evidence"], Memory()
    start = time.perf_counter()
    for number, group in enumerate(torch.arange(int(y.max()) + 1).chunk(tasks)):
        rows = [(label, y == label) for label in group.tolist()]
        parts = [(label, Embeddings(x[own], x[own][:, 0])) for label, own in rows]
        records = [rule.summarise(f"{label:04}", part, settings, label, False) for label, part in parts]
        memory.add(TaskRecord(f"task {number}", ClassTable.of(records), None))
    reader = reader_of(memory, settings)
    seconds = time.perf_counter() - start
    chunks = [part.flatten(1) for part in query.split(2000)]
    logits = torch.cat([reader.match(lambda rows, _, c=chunk: c[rows], len(chunk)).scores for chunk in chunks])
    predictions = reader.loo_predictions()
    assert predictions is not None
    return {
        "": accuracy(logits, labels), "_ece": calibration_error(logits, labels),
        "_nll": float(F.cross_entropy(logits, labels)), "_loo": 100 * float(predictions.correct.double().mean()),
        "_kB": float(memory.table.bytes_per_class().double().mean()) / 1000, "_seconds": seconds,
    }  # fmt: skip


def spaces(cache: Features) -> Tensor:
    """Return the feature spaces that the default classifier reads, [N, S, D]."""
    tokens, pool = cache["tokens"].float(), "mean" if int(cache["pooled"][0]) else "token"
    _, *others = feature_spaces(ViTConfig(1, 1, tokens.shape[-1], tokens.shape[1], 1, 1, pool=pool))
    earlier = [tokens[:, space.layer - 1, int(space.pool == "mean")] for space in others]
    return torch.stack([cache["embedding"], *(F.layer_norm(part, part.shape[-1:]) for part in earlier)], dim=1)


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
    x, query, targets, fifth = x[order].double(), query.double(), F.one_hot(y[order]).double(), len(y) // 5
    if len(x) < x.shape[1]:  # the regression lies in the span of the images
        span = torch.linalg.qr(x.T).Q
        x, query = x @ span, query @ span
    gram, cross = x[fifth:].T @ x[fifth:], x[fifth:].T @ targets[fifth:]
    values, vectors = torch.linalg.eigh(gram)
    turned, held = vectors.T @ cross, x[:fifth] @ vectors
    errors = [(held @ (turned / (values + a)[:, None]) - targets[:fifth]).square().mean() for a in LAMBDAS]
    strength = LAMBDAS[int(torch.stack(errors).argmin())]
    return query @ torch.linalg.solve(x.T @ x + strength * torch.eye(len(gram)), x.T @ targets)


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
