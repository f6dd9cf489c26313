"""Deep streaming linear discriminant analysis on the frozen backbone (Hayes and Kanan, CVPR workshops 2020).

Kept are the mean mu_k of every class and one covariance S of all images around the means of their classes. With
the shrunk inverse L = [(1 - e) S + e I]^-1, an embedding f scores for class k

    w_k . f - w_k . mu_k / 2,    w_k = L mu_k

and the largest score wins: the best rule for Gaussian classes of one shape that are equally frequent.

The paper's stream brings single images, and its update weighs an image's deviation from the mean before it by
the number of all images instead of its class's, so that its covariance depends on their order. Here S is exactly
the covariance within classes, however images are split into tasks. There is no phase that initialises S on other
data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.training_utils import answer_by, class_means, embedded, grown_means, numbered
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import Values, setting


@dataclass(frozen=True)
class SLDASettings(Values):
    # E: the paper's, and the default of its code (SLDA_Model.py).
    shrinkage: float = setting(1e-4, above=0, at_most=1)
    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)
    seed: int = setting(0, at_least=0)


class SLDA(Method):
    name = "slda"
    source = Source(
        "Hayes and Kanan",
        "Lifelong machine learning with deep streaming linear discriminant analysis",
        "CVPR workshops",
        2020,
    )
    settings_class = SLDASettings
    again = True

    def __init__(self, backbone: Backbone, settings: SLDASettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim, dtype=torch.float64)  # [K, D]
        self.covariance = torch.zeros(backbone.dim, backbone.dim, dtype=torch.float64)  # S
        self.counts = torch.empty(0, dtype=torch.long)  # [K]: the images of each class

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        classes, labels = numbered(task, self.classes)
        embeddings = embedded(task, self.backbone, self.embed_batch_size, on_stage).double()
        present, place = labels.unique(return_inverse=True)
        means, known = class_means(embeddings, labels), present[present < len(self.means)]
        apart = embeddings - means[place]
        # What was known of a class lies around another mean than what is new; known classes come first.
        shift, had = means[: len(known)] - self.means[known], self.counts
        self.means, self.counts = grown_means(self.means, had, embeddings, labels)
        weight = had[known] * (1 - had[known] / self.counts[known].double())
        spread = apart.T @ apart + (weight[:, None] * shift).T @ shift
        self.covariance = (had.sum() * self.covariance + spread) / self.counts.sum()
        self.tasks.append(classes)

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        queries = images.embed(torch.arange(len(images))).double()
        e = self.settings.shrinkage
        shrunk = (1 - e) * self.covariance + e * torch.eye(len(self.covariance))
        weights = torch.cholesky_solve(self.means.T, torch.linalg.cholesky(shrunk))  # [D, K]
        return answer_by(queries @ weights - (self.means.T * weights).sum(dim=0) / 2)

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "covariance": self.covariance, "counts": self.counts}

    def bytes_per_task(self) -> list[int]:
        """Every task brings its means and counts, the first one the covariance."""
        rows = [8 * len(task) * (self.backbone.dim + 1) for task in self.tasks]
        return [rows[0] + self.covariance.nbytes, *rows[1:]] if rows else []
