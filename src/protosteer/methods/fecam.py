"""FeCAM: every class has a covariance of its own, and the nearest mean in its metric wins (Goswami et al.,
NeurIPS 2023), on the frozen backbone.

Embeddings f are scaled to length one. Of a class's images there are the mean mu and the covariance S, which is

    shrunk:      S + gamma1 V1 I + gamma2 V2 (1 - I),  V1 and V2 the means of S on and off its diagonal
    normalised:  entry (i, j) divided by the deviations of i and j, so that classes can be compared

and the class with the least Mahalanobis distance (f - mu)^T N^-1 (f - mu) wins, N being what S has become.
Tukey's power transformation is left out, as in the authors' runs on a ViT: it is for features that are never
negative. Since only N^-1 is needed later, that is what is kept, D * D numbers per class. Ours alone: a class of
one image, or of equal ones, has N = I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Lesson, Method, Source
from protosteer.methods.toolkit import embedded, numbered
from protosteer.running.progress import OnStage
from protosteer.running.resume import Bookmark
from protosteer.settings import Values


@dataclass(frozen=True)
class FeCAMSettings(Values):
    # The authors' for Split CIFAR-100 on a ViT (FeCAM_vit_cifar100.py); for ImageNet-R they have 10 and 10.
    gamma1: float = 1.0
    gamma2: float = 0.0
    embed_batch_size: int = 64
    seed: int = 0

    AT_LEAST: ClassVar = {"gamma2": 0, "embed_batch_size": 1, "seed": 0}
    ABOVE_ZERO: ClassVar = ("gamma1",)  # S has no inverse where there are fewer images than dimensions


class FeCAM(Method):
    name = "fecam"
    source = Source(
        "Goswami et al.",
        "FeCAM: exploiting the heterogeneity of class distributions in exemplar-free continual learning",
        "NeurIPS",
        2023,
    )
    settings_class = FeCAMSettings

    def __init__(self, backbone: Backbone, settings: FeCAMSettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim)  # [K, D]
        self.inverses = torch.empty(0, backbone.dim, backbone.dim)  # [K, D, D]: N^-1

    def learn(self, task: Lesson, on_stage: OnStage | None = None, bookmark: Bookmark | None = None) -> None:
        s = self.settings
        classes, labels = numbered(task, self.classes)
        embeddings = F.normalize(embedded(task, self.backbone, self.embed_batch_size, on_stage).double())
        own = [embeddings[labels == k] for k in labels.unique()]
        inverses = [inverse(metric(some, s.gamma1, s.gamma2)) for some in own]
        self.means = torch.cat([self.means, torch.stack([some.mean(dim=0) for some in own]).float()])
        self.inverses = torch.cat([self.inverses, torch.stack(inverses).float()])
        self.tasks.append(classes)

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        queries = F.normalize(images.embed(torch.arange(len(images))))
        return Answer(self.distances(queries).argmin(dim=1))

    def distances(self, queries: Tensor) -> Tensor:
        """[B, K]: squared, of queries [B, D] of length one to every class."""
        found = []
        for mean, inverted in zip(self.means, self.inverses, strict=True):
            apart = queries - mean
            found.append((apart @ inverted * apart).sum(dim=1))
        return torch.stack(found, dim=1)

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "inverses": self.inverses}

    def bytes_per_task(self) -> list[int]:
        dim = self.backbone.dim
        return [4 * len(task) * dim * (dim + 1) for task in self.tasks]


def inverse(matrix: Tensor) -> Tensor:
    """A pseudo-inverse: with gamma1 = gamma2, N is singular for features that always have the same sum."""
    return torch.linalg.pinv(matrix, rtol=1e-9, hermitian=True)


def metric(rows: Tensor, gamma1: float, gamma2: float) -> Tensor:
    """N [D, D] of a class's rows [n, D]: their covariance, shrunk and normalised."""
    dim = rows.shape[1]
    apart = rows - rows.mean(dim=0)
    covariance = apart.T @ apart / max(1, len(rows) - 1)
    diagonal = covariance.trace()
    on, off = diagonal / dim, (covariance.sum() - diagonal) / max(1, dim * (dim - 1))
    unit = torch.eye(dim).to(covariance)
    if on == 0:
        return unit
    shrunk = covariance + gamma1 * on * unit + gamma2 * off * (1 - unit)
    deviations = shrunk.diagonal().sqrt()
    return shrunk / deviations.outer(deviations)
