"""Detect prompt collapse and backbones near chance, before the accuracy shows them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NEAR_CHANCE = 0.2  # share of the way from chance to perfect below which weights hardly tell classes apart
COLLAPSED = 0.9  # mean cosine between class means from which on classes have fallen together
MIN_SHRINKAGE = 4.0  # and how much wider, at least, the angle between them was without the prompt


def spread(embeddings: Tensor) -> float:
    """Mean cosine of embeddings [n, D] to their common mean; 1 means that all are one point."""
    return float(F.cosine_similarity(embeddings, embeddings.mean(dim=0, keepdim=True), dim=1).mean())


def class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    """[K, D] of embeddings [n, D] with labels 0 to K - 1, each of which occurs."""
    sums = torch.zeros(int(labels.max()) + 1, embeddings.shape[1]).index_add_(0, labels, embeddings)
    return sums / torch.bincount(labels)[:, None]


def class_overlap(embeddings: Tensor, labels: Tensor) -> float:
    """Mean cosine between the means of different classes."""
    means = F.normalize(class_means(embeddings, labels), dim=1)
    k = len(means)
    return float(((means @ means.T).sum() - k) / (k * (k - 1)))


def own_mean_accuracy(embeddings: Tensor, labels: Tensor) -> float:
    """Percent of images nearest, by cosine, to their own class mean: leave-one-out."""
    n, k = len(labels), int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=k)
    sums = class_means(embeddings, labels) * counts[:, None]  # [K, D]
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(sums, dim=1).T  # [n, K]
    loo = F.cosine_similarity(embeddings, sums[labels] - embeddings, dim=1)  # [n]
    similarity[torch.arange(n), labels] = torch.where(counts[labels] > 1, loo, -torch.inf)
    return 100.0 * float((similarity.argmax(dim=1) == labels).float().mean())


def accuracy_and_spread(embeddings: Tensor, labels: Tensor) -> tuple[float, float]:
    """`own_mean_accuracy` and `spread`, the metrics of an epoch."""
    return own_mean_accuracy(embeddings, labels), spread(embeddings)


def near_chance(keys: Tensor, labels: Tensor) -> str | None:
    """Warn if the training-free baseline hardly beats chance on the task's own images."""
    classes = int(labels.max()) + 1
    if classes < 2 or len(labels) <= classes:
        return None
    accuracy, chance = own_mean_accuracy(keys, labels), 100.0 / classes
    if accuracy - chance >= NEAR_CHANCE * (100.0 - chance):
        return None
    return (
        f"the backbone hardly tells these {classes} classes apart without training: {accuracy:.1f} % of the "
        f"images are nearest to their own class mean, chance is {chance:.1f} %. Check that weights and "
        "preprocessing belong together, and prefer supervised or fine-tuned weights"
    )


def collapse(keys: Tensor, values: Tensor, labels: Tensor) -> str | None:
    """Warn if training has pushed embeddings of different classes to nearly one point."""
    if int(labels.max()) < 1:
        return None
    before, after = class_overlap(keys, labels), class_overlap(values, labels)
    if after < COLLAPSED or MIN_SHRINKAGE * (1.0 - after) >= 1.0 - before:
        return None
    return (
        f"the prompt has collapsed: mean cosine between classes is {after:.2f} with it, {before:.2f} without "
        f"(spread of all embeddings {spread(values):.2f} against {spread(keys):.2f}). Use fewer prototypes "
        "per step (prototypes_per_step at most the batch size), a larger batch, or prompt_start='zero'"
    )
