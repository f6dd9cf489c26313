"""Deep streaming linear discriminant analysis on the frozen backbone (Hayes and Kanan, CVPR workshops 2020).

Stored are the mean mu_k of every class and one covariance S of all images around their class means. With the shrunk
inverse L = [(1 - e) S + e I]^-1, an embedding f has the score

    w_k . f - w_k . mu_k / 2,    w_k = L mu_k

for class k, and the largest score is predicted. This is the optimal rule for equally frequent Gaussian classes with
the same covariance.

The paper's stream brings single images. Its update weighs an image's deviation by the number of all images instead of
its class's, so its covariance depends on their order. Here S is exactly the covariance within classes, however images
are split into tasks. No phase initialises S on other data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, MethodSettings, Source, TrainingTask, register_method
from protosteer.methods.training_utils import answer_by, class_means, embed_task, number_labels, update_means
from protosteer.settings import setting


@dataclass(frozen=True)
class SLDASettings(MethodSettings):
    """Settings of SLDA."""

    # e: the paper's, and the default of its code (SLDA_Model.py). Above 0: with few images, S has no inverse.
    shrinkage: float = setting(1e-4, above=0, at_most=1)


@register_method("slda")
class SLDA(Method):
    """Linear discriminant analysis, updated task by task."""

    source = Source(
        "Hayes and Kanan",
        "Lifelong machine learning with deep streaming linear discriminant analysis",
        "CVPR workshops",
        2020,
    )
    settings_class = SLDASettings
    grid = {"shrinkage": (1e-4, 1e-2, 1e-1)}
    supports_repeated_classes = True
    state_fields = {"means": "per class", "covariance": "once", "counts": "per class"}

    def __init__(self, backbone: Backbone, settings: SLDASettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim, dtype=torch.float64)  # float64 [K, D]
        self.covariance = torch.zeros(backbone.dim, backbone.dim, dtype=torch.float64)  # S, float64 [D, D]
        self.counts = torch.empty(0, dtype=torch.long)  # the number of images of each class, int64 [K]

    def learn(self, task: TrainingTask) -> None:
        """Update means and covariance with the task's embeddings."""
        classes, labels = number_labels(task, self.classes)
        embeddings = embed_task(task, self.backbone, self.embed_batch_size).double()
        class_numbers, position = labels.unique(return_inverse=True)
        means, known_numbers = class_means(embeddings, labels), class_numbers[class_numbers < len(self.means)]
        deviations = embeddings - means[position]
        # Earlier images of a class lie around another mean than the new ones; known classes come first.
        shift, old_counts = means[: len(known_numbers)] - self.means[known_numbers], self.counts
        self.means, self.counts = update_means(self.means, old_counts, embeddings, labels)
        weight = old_counts[known_numbers] * (1 - old_counts[known_numbers] / self.counts[known_numbers].double())
        scatter = deviations.T @ deviations + (weight[:, None] * shift).T @ shift
        self.covariance = (old_counts.sum() * self.covariance + scatter) / self.counts.sum()
        self.tasks.append(classes)

    def answer(self, images: Images) -> Answer:
        """Predict the class with the largest score."""
        queries = images.embed(torch.arange(len(images))).double()
        e = self.settings.shrinkage
        covariance = (1 - e) * self.covariance + e * torch.eye(len(self.covariance))
        weights = torch.cholesky_solve(self.means.T, torch.linalg.cholesky(covariance))  # [D, K]
        return answer_by(queries @ weights - (self.means.T * weights).sum(dim=0) / 2)
