"""Measures that tell a sick model before its end figure does: collapse, and weights that see nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Below this share of the way from chance to perfect, the weights hardly tell the classes apart.
_NEAR_CHANCE = 0.2
# Different classes whose means stand at this cosine or above have fallen together ...
_FALLEN_TOGETHER = 0.9
# ... if prompts did it: without them the angle between classes was at least so many times wider.
_SHRUNK = 4.0


def spread(embeddings: Tensor) -> float:
    """Mean cosine of the embeddings to their common mean; 1 means that all are one point."""
    return float(F.cosine_similarity(embeddings, embeddings.mean(dim=0, keepdim=True), dim=1).mean())


def class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    """[K, D] for labels 0..K-1, each of which occurs."""
    sums = torch.zeros(int(labels.max()) + 1, embeddings.shape[1]).index_add_(0, labels, embeddings)
    return sums / torch.bincount(labels)[:, None]


def class_overlap(embeddings: Tensor, labels: Tensor) -> float:
    """Mean cosine between the means of different classes."""
    means = F.normalize(class_means(embeddings, labels), dim=1)
    k = len(means)
    return float(((means @ means.T).sum() - k) / (k * (k - 1)))


def own_mean_accuracy(embeddings: Tensor, labels: Tensor) -> float:
    """Percent of images nearest (by cosine) to their own class mean, each left out of its own mean."""
    n, k = len(labels), int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=k)
    sums = class_means(embeddings, labels) * counts[:, None]
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(sums, dim=1).T
    left_out = F.cosine_similarity(embeddings, sums[labels] - embeddings, dim=1)
    similarity[torch.arange(n), labels] = torch.where(counts[labels] > 1, left_out, -torch.inf)
    return 100.0 * float((similarity.argmax(dim=1) == labels).float().mean())


def near_chance(keys: Tensor, labels: Tensor) -> str | None:
    """A warning where the training-free baseline hardly beats chance on the task's own images."""
    classes = int(labels.max()) + 1
    if classes < 2 or len(labels) <= classes:
        return None
    accuracy, chance = own_mean_accuracy(keys, labels), 100.0 / classes
    if accuracy - chance >= _NEAR_CHANCE * (100.0 - chance):
        return None
    return (
        f"the backbone hardly tells these {classes} classes apart without training: {accuracy:.1f} % of the "
        f"images are nearest to their own class mean, chance is {chance:.1f} %. Check that weights and "
        "preprocessing belong together, and prefer supervised or fine-tuned weights"
    )


def collapse(keys: Tensor, values: Tensor, labels: Tensor) -> str | None:
    """A warning where training has pushed embeddings of different classes to nearly one point."""
    if int(labels.max()) < 1:
        return None
    before, after = class_overlap(keys, labels), class_overlap(values, labels)
    if after < _FALLEN_TOGETHER or _SHRUNK * (1.0 - after) >= 1.0 - before:
        return None
    return (
        f"the prompt has collapsed: mean cosine between classes is {after:.2f} with it, {before:.2f} without "
        f"(spread of all embeddings {spread(values):.2f} against {spread(keys):.2f}). Use fewer prototypes "
        "per step (prototypes_per_step at most the batch size), a larger batch, or prompt_start='zero'"
    )
