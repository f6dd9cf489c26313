"""Detect prompt collapse and backbones near chance, before the accuracy shows them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NEAR_CHANCE = 0.2  # share of the way from chance to 100 % below which a backbone counts as near chance
COLLAPSED = 0.9  # mean cosine between class means, under the prompt, from which on it may have collapsed
MIN_SHRINKAGE = 4.0  # least ratio of 1 - mean cosine without the prompt to 1 - mean cosine under a collapsed one


def spread(embeddings: Tensor) -> float:
    """Return the mean cosine of embeddings [n, D] to their mean; 1 means that all point in one direction."""
    return float(F.cosine_similarity(embeddings, embeddings.mean(dim=0, keepdim=True), dim=1).mean())


def class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Average embeddings [n, D] by label [n], 0 to K - 1, each of which occurs: [K, D]."""
    sums = torch.zeros(int(labels.max()) + 1, embeddings.shape[1]).index_add_(0, labels, embeddings)
    return sums / torch.bincount(labels)[:, None]


def class_overlap(embeddings: Tensor, labels: Tensor) -> float:
    """Return the mean cosine between class means of embeddings [n, D] with labels [n], over pairs of classes."""
    means = F.normalize(class_means(embeddings, labels), dim=1)
    k = len(means)
    return float(((means @ means.T).sum() - k) / (k * (k - 1)))


def loo_ncm_accuracy(embeddings: Tensor, labels: Tensor) -> float:
    """Classify embeddings [n, D] by the nearest class mean, leave-one-out: percent correct; lone images are errors."""
    n, k = len(labels), int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=k)
    sums = class_means(embeddings, labels) * counts[:, None]  # [K, D]
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(sums, dim=1).T  # [n, K]
    loo = F.cosine_similarity(embeddings, sums[labels] - embeddings, dim=1)  # [n]
    similarity[torch.arange(n), labels] = torch.where(counts[labels] > 1, loo, -torch.inf)
    return 100.0 * float((similarity.argmax(dim=1) == labels).float().mean())


def accuracy_and_spread(embeddings: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return `loo_ncm_accuracy` and `spread` of embeddings [n, D] with labels [n]: the metrics of an epoch."""
    return loo_ncm_accuracy(embeddings, labels), spread(embeddings)


def near_chance(keys: Tensor, labels: Tensor) -> str | None:
    """Return a warning if class means of keys [n, D], without a prompt, hardly beat chance on labels [n]; else None."""
    classes = int(labels.max()) + 1
    if classes < 2 or len(labels) <= classes:
        return None
    accuracy, chance = loo_ncm_accuracy(keys, labels), 100.0 / classes
    if accuracy - chance >= NEAR_CHANCE * (100.0 - chance):
        return None
    return (
        f"the backbone hardly tells these {classes} classes apart without training: {accuracy:.1f} % of the "
        f"images are nearest to their own class mean, chance is {chance:.1f} %. Check that weights and "
        "preprocessing belong together, and prefer supervised or fine-tuned weights"
    )


def collapse(keys: Tensor, values: Tensor, labels: Tensor) -> str | None:
    """Return a warning if classes overlap in values [n, D], under the prompt, but not in keys [n, D]; else None."""
    if int(labels.max()) < 1:
        return None
    key_overlap, value_overlap = class_overlap(keys, labels), class_overlap(values, labels)
    if value_overlap < COLLAPSED or MIN_SHRINKAGE * (1.0 - value_overlap) >= 1.0 - key_overlap:
        return None
    return (
        f"the prompt has collapsed: mean cosine between classes is {value_overlap:.2f} with it, "
        f"{key_overlap:.2f} without (spread of all embeddings {spread(values):.2f} against {spread(keys):.2f}). Use fewer prototypes "
        "per step (prototypes_per_step at most the batch size), a larger batch, or prompt_start='zero'"
    )
