"""FeCAM: every class has a covariance of its own, and the nearest mean in its metric wins (Goswami et al.,
NeurIPS 2023), on the frozen backbone.

Embeddings f are scaled to length one. Of a class's images there are the mean mu and the covariance S, which is

    shrunk:      S + gamma1 V1 I + gamma2 V2 (1 - I),  V1 and V2 the means of S on and off its diagonal
    normalised:  entry (i, j) divided by the deviations of i and j, so that classes can be compared

and the class with the least Mahalanobis distance (f - mu)^T N^-1 (f - mu) wins, N being what S has become.
Tukey's power transformation is left out, as in the authors' runs on a ViT: it is for features that are never
negative. Kept are mu and the sums behind S, so that more images of a class may come later: the lower triangle, in
double precision, takes what N takes in single. Ours alone: a class of one image, or of equal ones, has N = I.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.training_utils import embedded, grown_means, numbered
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import Values, setting


@dataclass(frozen=True)
class FeCAMSettings(Values):
    # The authors' for Split CIFAR-100 on a ViT (FeCAM_vit_cifar100.py); for ImageNet-R they have 10 and 10.
    gamma1: float = setting(1.0, above=0)
    gamma2: float = setting(0.0, at_least=0)
    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)
    seed: int = setting(0, at_least=0)


class FeCAM(Method):
    name = "fecam"
    source = Source(
        "Goswami et al.",
        "FeCAM: exploiting the heterogeneity of class distributions in exemplar-free continual learning",
        "NeurIPS",
        2023,
    )
    settings_class = FeCAMSettings
    again = True

    def __init__(self, backbone: Backbone, settings: FeCAMSettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim)  # [K, D]
        self.counts = torch.empty(0, dtype=torch.long)  # [K]: the images of each class
        triangle = backbone.dim * (backbone.dim + 1) // 2
        self.sums = torch.empty(0, triangle, dtype=torch.float64)  # of products around the mean: (n - 1) S
        self.inverses = torch.empty(0, backbone.dim, backbone.dim)  # [K, D, D]: N^-1, which follows from them

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        classes, labels = numbered(task, self.classes)
        embeddings = F.normalize(embedded(task, self.backbone, self.embed_batch_size, on_stage).double())
        old, had = self.means.double(), F.pad(self.counts, (0, len(classes)))
        means, self.counts = grown_means(old, self.counts, embeddings, labels)
        old, self.means = F.pad(old, (0, 0, 0, len(classes))), means.float()
        self.sums = F.pad(self.sums, (0, 0, 0, len(classes)))
        self.inverses = F.pad(self.inverses, (0, 0, 0, 0, 0, len(classes)))
        for k in labels.unique().tolist():
            own = embeddings[labels == k]
            apart, shift = own - own.mean(dim=0), own.mean(dim=0) - old[k]
            between = had[k] * (1 - had[k] / self.counts[k].double()) * shift.outer(shift)
            self.sums[k] += (apart.T @ apart + between)[self._triangle()]
            self._invert(k)
        self.tasks.append(classes)

    def _triangle(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of the entries that a symmetric matrix is kept as."""
        rows, columns = torch.tril_indices(self.backbone.dim, self.backbone.dim)
        return rows, columns

    def _invert(self, k: int) -> None:
        rows, columns = self._triangle()
        covariance = self.sums.new_empty(self.backbone.dim, self.backbone.dim)
        covariance[rows, columns] = covariance[columns, rows] = self.sums[k] / max(1, int(self.counts[k]) - 1)
        self.inverses[k] = inverse(metric(covariance, self.settings.gamma1, self.settings.gamma2))

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
        return {"means": self.means, "counts": self.counts, "sums": self.sums}

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        super().put_back(tensors)
        self.inverses = torch.zeros(len(self.means), self.backbone.dim, self.backbone.dim)
        for k in range(len(self.means)):
            self._invert(k)

    def bytes_per_task(self) -> list[int]:
        dim = self.backbone.dim
        return [len(task) * (4 * dim + 8 + 4 * dim * (dim + 1)) for task in self.tasks]


def inverse(matrix: Tensor) -> Tensor:
    """A pseudo-inverse: with gamma1 = gamma2, N is singular for features that always have the same sum."""
    return torch.linalg.pinv(matrix, rtol=1e-9, hermitian=True)


def metric(covariance: Tensor, gamma1: float, gamma2: float) -> Tensor:
    """N [D, D]: a class's covariance, shrunk and normalised."""
    dim = len(covariance)
    diagonal = covariance.trace()
    on, off = diagonal / dim, (covariance.sum() - diagonal) / max(1, dim * (dim - 1))
    unit = torch.eye(dim).to(covariance)
    if on == 0:
        return unit
    shrunk = covariance + gamma1 * on * unit + gamma2 * off * (1 - unit)
    deviations = shrunk.diagonal().sqrt()
    return shrunk / deviations.outer(deviations)
