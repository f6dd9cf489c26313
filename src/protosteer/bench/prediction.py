"""Prediction against the limit, against the authors' way of doing it, and with late prompts.

The limit: as many plain forward passes as prediction makes, without prompts, on tensors that are ready, in
batches of the best size, by the same `vit.py`. No retrieval, no matching, no preprocessing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.bench.subjects import concatenating, memory_of, pictures, vit_tiny
from protosteer.bench.timing import Ratio, Side, interleaved
from protosteer.learner import Learner
from protosteer.method.vit import ViT

TASKS, CLASSES, CENTROIDS = 10, 10, 5
IMAGES, NANO_IMAGES = 64, 1024
FEW_IMAGES, FEW_NANO_IMAGES = 16, 256  # where many ways are compared, each of them linear in the images
BATCHES = (8, 16, 32, 64)
LATE, LATE_NANO = (4, 7, 10), (2,)  # layers that prompts begin in
LIMIT_TARGET, TARGET = 0.95, 1.0


def run(repeats: int) -> list[Ratio]:
    tiny, nano = vit_tiny(), Backbone.load("nano")
    return [
        against_limit("predict", tiny, IMAGES, repeats),
        against_limit("predict_nano", nano, NANO_IMAGES, repeats),
        *against_authors("predict_authors", tiny, FEW_IMAGES, repeats, LATE),
        *against_authors("predict_authors_nano", nano, FEW_NANO_IMAGES, repeats, LATE_NANO, "nano_"),
    ]


def learner_for(backbone: Backbone, prompt_from_layer: int = 1) -> Learner:
    """A learner of ten tasks of ten classes; all such learners retrieve the same candidates."""
    learner = Learner(backbone)
    learner.memory = memory_of(backbone, TASKS, CLASSES, CENTROIDS, prompt_from_layer)
    return learner


def against_limit(name: str, backbone: Backbone, count: int, repeats: int) -> Ratio:
    learner, pixels = learner_for(backbone), pictures(backbone, count)
    candidates = sum(len(tasks) for tasks in learner.predict(pixels).candidates)
    ready = backbone.preprocessing(pixels)
    batch = best_batch(backbone.vit, ready)
    limit = partial(plain_passes, backbone.vit, ready, count + candidates, batch)
    times = interleaved({"limit": limit, "ours": lambda: learner.predict(pixels)}, repeats)
    return Ratio.of(
        name,
        f"{backbone.name}: predict, against as many plain forward passes",
        times["limit"],
        times["ours"],
        LIMIT_TARGET,
        [
            f"{count / median(times['ours']):.1f} images a second, {candidates / count:.2f} candidates each",
            f"limit: {(count + candidates) / median(times['limit']):.1f} passes a second, batches of {batch}",
        ],
    )


def plain_passes(vit: ViT, ready: Tensor, passes: int, batch: int) -> None:
    """Embeds the ready images [N, 3, H, W] again and again, until `passes` have been embedded."""
    rounds, rest = divmod(passes, len(ready))
    with torch.inference_mode():
        for images in [ready] * rounds + [ready[:rest]] * (rest > 0):
            for some in images.split(batch):
                vit(some)


def best_batch(vit: ViT, ready: Tensor, sizes: Sequence[int] = BATCHES) -> int:
    """The size of batches at which plain passes are quickest, by a short trial."""
    some = ready[: max(sizes)]
    sides: dict[str, Side] = {str(size): partial(plain_passes, vit, some, len(some), size) for size in sizes}
    times = interleaved(sides, 2, warm_up=False)
    return int(min(times, key=lambda size: min(times[size])))


def against_authors(
    name: str, backbone: Backbone, count: int, repeats: int, late: Sequence[int] = (), which: str = ""
) -> list[Ratio]:
    """The authors' way against ours, and ours with prompts in all layers against prompts from layer k on."""
    pixels, learner = pictures(backbone, count), learner_for(backbone)
    sides: dict[str, Side] = {
        "authors": partial(authors_labels, learner, pixels),
        "ours": partial(learner.predict, pixels),
        **{f"k{k}": partial(learner_for(backbone, k).predict, pixels) for k in late},
    }
    times = interleaved(sides, repeats)
    rate = {side: f"{count / median(seconds):.1f} images a second" for side, seconds in times.items()}
    first = Ratio.of(
        name,
        f"{backbone.name}: predict, against one pass per image and prompt",
        times["authors"],
        times["ours"],
        TARGET,
        [f"{rate['ours']}; the authors' way: {rate['authors']}"],
    )
    return [first] + [
        Ratio.of(
            f"late_predict_{which}k{k}",
            f"{backbone.name}: predict with prompts from layer {k} on, against all layers",
            times["ours"],
            times[f"k{k}"],
            TARGET,
            [f"{rate[f'k{k}']}; all layers: {rate['ours']}"],
        )
        for k in late
    ]


def authors_labels(learner: Learner, pixels: Tensor, batch: int = 64) -> list[str]:
    """As the paper's public code does it: a batched coarse pass, then each image alone under each candidate."""
    vit, tasks = learner.backbone.vit, learner.memory.tasks
    records = [(task, record) for task in tasks for record in task.classes]
    keys = F.normalize(torch.cat([record.keys for _, record in records]), dim=1)
    key_prompts = [task.prompt for task, record in records for _ in record.keys]
    values = F.normalize(torch.cat([record.values.means for _, record in records]), dim=1)
    value_labels = [record.name for _, record in records for _ in record.values.means]
    labels = []
    with torch.no_grad():
        images = learner.backbone.preprocessing(pixels)
        queries = torch.cat([concatenating(vit, some) for some in images.split(batch)])
        for image, query in zip(images, queries, strict=True):
            nearest = (keys @ F.normalize(query, dim=0)).topk(learner.settings.neighbours).indices
            prompts = {id(key_prompts[i]): key_prompts[i] for i in nearest.tolist()}  # each once
            embeddings = torch.cat([concatenating(vit, image[None], prompt) for prompt in prompts.values()])
            similarity = (F.normalize(embeddings, dim=1) @ values.T).amax(dim=0)
            labels.append(value_labels[int(similarity.argmax())])
    return labels
