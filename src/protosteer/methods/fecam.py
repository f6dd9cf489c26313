"""FeCAM (Goswami et al., NeurIPS 2023) on the frozen backbone: nearest mean under each class's own covariance.

Embeddings f are scaled to unit length. A class has the mean mu and covariance S of its images. The covariance is

    shrunk:      S + gamma1 V1 I + gamma2 V2 (1 - I),  V1 and V2 the means of S on and off its diagonal
    normalised:  entry (i, j) divided by the deviations of i and j, so that classes can be compared

and the prediction is the class with the least Mahalanobis distance (f - mu)^T N^-1 (f - mu), where N is the result.
Tukey's power transformation is omitted, as in the authors' runs on a ViT, because it is for non-negative features.
Stored are mu and the sums behind S, so that more images of a class may come later: the lower triangle in double
precision, which takes as many bytes as N in single. Our addition: a class of one image, or of equal ones, has N = I.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, MethodSettings, Source, TrainingTask, register_method
from protosteer.methods.training_utils import embed_task, number_labels, update_means
from protosteer.settings import setting


@dataclass(frozen=True)
class FeCAMSettings(MethodSettings):
    """Settings of FeCAM; defaults are the authors' for Split CIFAR-100 on a ViT (FeCAM_vit_cifar100.py).

    For ImageNet-R they have 10 and 10.
    """

    # Above 0, because S has no inverse with fewer images than dimensions.
    gamma1: float = setting(1.0, above=0)
    gamma2: float = setting(0.0, at_least=0)


@register_method("fecam")
class FeCAM(Method):
    """Nearest class mean by Mahalanobis distance, with one covariance per class."""

    source = Source(
        "Goswami et al.",
        "FeCAM: exploiting the heterogeneity of class distributions in exemplar-free continual learning",
        "NeurIPS",
        2023,
    )
    settings_class = FeCAMSettings
    published = {"split-cifar100": {}, "imagenet-r": {"gamma1": 10.0, "gamma2": 10.0}}
    published_source = "FeCAM_vit_cifar100.py and its ImageNet-R twin in the authors' code"
    grid = {"gamma1": (1.0, 0.1, 10.0)}
    supports_repeated_classes = True
    state_fields = {"means": "per class", "counts": "per class", "sums": "per class"}

    def __init__(self, backbone: Backbone, settings: FeCAMSettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim)  # [K, D]
        self.counts = torch.empty(0, dtype=torch.long)  # the number of images of each class, int64 [K]
        # Lower triangles of the sums of products around the means, (n - 1) S, float64 [K, D (D + 1) / 2].
        self.sums = torch.empty(0, backbone.dim * (backbone.dim + 1) // 2, dtype=torch.float64)
        # N^-1 of each class, computed from the sums, [K, D, D].
        self.inverses = torch.empty(0, backbone.dim, backbone.dim)

    def learn(self, task: TrainingTask) -> None:
        """Update means and covariances of the task's classes."""
        classes, labels = number_labels(task, self.classes)
        embeddings = F.normalize(embed_task(task, self.backbone, self.embed_batch_size).double())
        old_means, old_counts = self.means.double(), F.pad(self.counts, (0, len(classes)))
        means, self.counts = update_means(old_means, self.counts, embeddings, labels)
        old_means, self.means = F.pad(old_means, (0, 0, 0, len(classes))), means.float()
        self.sums = F.pad(self.sums, (0, 0, 0, len(classes)))
        self.inverses = F.pad(self.inverses, (0, 0, 0, 0, 0, len(classes)))
        for k in labels.unique().tolist():
            class_rows = embeddings[labels == k]
            deviations, shift = class_rows - class_rows.mean(dim=0), class_rows.mean(dim=0) - old_means[k]
            shift_term = old_counts[k] * (1 - old_counts[k] / self.counts[k].double()) * shift.outer(shift)
            self.sums[k] += (deviations.T @ deviations + shift_term)[self._triangle()]
            self._invert(k)
        self.tasks.append(classes)

    def _triangle(self) -> tuple[Tensor, Tensor]:
        """Return rows and columns of the entries that are stored of a symmetric matrix."""
        rows, columns = torch.tril_indices(self.backbone.dim, self.backbone.dim)
        return rows, columns

    def _invert(self, k: int) -> None:
        rows, columns = self._triangle()
        covariance = self.sums.new_empty(self.backbone.dim, self.backbone.dim)
        covariance[rows, columns] = covariance[columns, rows] = self.sums[k] / max(1, int(self.counts[k]) - 1)
        self.inverses[k] = inverse(metric(covariance, self.settings.gamma1, self.settings.gamma2))

    def answer(self, images: Images) -> Answer:
        """Predict the class with the least distance."""
        queries = F.normalize(images.embed(torch.arange(len(images))))
        distances = self.distances(queries)
        return Answer(distances.argmin(dim=1), scores=-distances)

    def distances(self, queries: Tensor) -> Tensor:
        """Compute squared distances [B, K] of unit-length queries [B, D] to every class."""
        columns = []
        for mean, precision in zip(self.means, self.inverses, strict=True):
            difference = queries - mean
            columns.append((difference @ precision * difference).sum(dim=1))
        return torch.stack(columns, dim=1)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore means and sums, and invert the covariances; see `Method.load_state_dict`."""
        super().load_state_dict(tensors)
        self.inverses = torch.zeros(len(self.means), self.backbone.dim, self.backbone.dim)
        for k in range(len(self.means)):
            self._invert(k)


def inverse(matrix: Tensor) -> Tensor:
    """Compute a pseudo-inverse: if gamma1 = gamma2, N is singular for features with a constant sum."""
    return torch.linalg.pinv(matrix, rtol=1e-9, hermitian=True)


def metric(covariance: Tensor, gamma1: float, gamma2: float) -> Tensor:
    """Shrink and normalise a class's covariance [D, D]; returns N [D, D]."""
    dim = len(covariance)
    diagonal = covariance.trace()
    v1, v2 = diagonal / dim, (covariance.sum() - diagonal) / max(1, dim * (dim - 1))
    unit = torch.eye(dim).to(covariance)
    if v1 == 0:
        return unit
    matrix = covariance + gamma1 * v1 * unit + gamma2 * v2 * (1 - unit)
    deviations = matrix.diagonal().sqrt()
    return matrix / deviations.outer(deviations)
