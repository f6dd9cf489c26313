"""Nearest class mean on the frozen backbone (paper, Sec. 3.2), also with several centroids per class.

Nothing is trained. A class is the mean of its training images' embeddings, or the means of a few clusters of them. The
prediction is the class of the most similar centroid. More images of a class update its mean to the mean of all; with
several centroids, those of the new images are added to the existing ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, MethodSettings, Source, TrainingTask, register_method
from protosteer.methods.training_utils import embed_task, number_labels, task_seed
from protosteer.paper.prototypes import Centroids, centroids
from protosteer.settings import CLUSTERINGS, LABEL_ASSIGNMENTS, setting


@dataclass(frozen=True)
class NCMSettings(MethodSettings):
    """Settings of NCM."""

    centroids: int = setting(1, at_least=1, at_most=10_000)  # per class
    clustering: str = setting("spectral", choices=CLUSTERINGS)
    assign_labels: str = setting("discretize", choices=LABEL_ASSIGNMENTS)
    # The tasks of so many nearest centroids count as retrieved.
    neighbours: int = setting(3, at_least=1, at_most=10_000)


@register_method("ncm")
class NCM(Method):
    """Nearest class mean."""

    source = Source("Mensink et al.", "Distance-based image classification: nearest class mean", "TPAMI", 2013)
    settings_class = NCMSettings
    published = dict.fromkeys(("split-cifar100", "imagenet-r", "five-datasets"), {})
    published_source = "CPP's Table 3, the baseline that trains nothing"
    grid = {"centroids": (1, 3, 5)}
    supports_repeated_classes = True
    state_fields = {"means": "owners", "owners": "owners", "counts": "owners"}

    def __init__(self, backbone: Backbone, settings: NCMSettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim)  # the centroids of all classes, [K, D]
        self.owners = torch.empty(0, dtype=torch.long)  # the class of each, int64 [K]
        self.counts = torch.empty(0, dtype=torch.long)  # the number of images of each, int64 [K]

    def learn(self, task: TrainingTask) -> None:
        """Compute the centroids of the task's classes."""
        s = self.settings
        classes, labels = number_labels(task, self.classes)
        embeddings = embed_task(task, self.backbone, s.embed_batch_size)
        seed = task_seed(s.seed, classes or [task.name]) % 2**32
        for number in labels.unique():
            class_rows = embeddings[labels == number]
            self._add(number, centroids(class_rows, s.centroids, s.clustering, s.assign_labels, seed))
        self.tasks.append(classes)

    def _add(self, number: Tensor, clusters: Centroids) -> None:
        mask = self.owners == number
        if self.settings.centroids == 1 and mask.any():
            self.counts = self.counts + mask * clusters.counts
            shift = (clusters.means - self.means) * (clusters.counts / self.counts)[:, None]
            self.means = torch.where(mask[:, None], self.means + shift, self.means)
            return
        self.means = torch.cat([self.means, clusters.means])
        self.owners = torch.cat([self.owners, number.expand(len(clusters.means))])
        self.counts = torch.cat([self.counts, clusters.counts])

    def answer(self, images: Images) -> Answer:
        """Predict the class of the most similar centroid."""
        queries = images.embed(torch.arange(len(images)))
        similarity = F.normalize(queries, dim=1) @ F.normalize(self.means, dim=1).T  # [B, K]
        rows = similarity.topk(min(self.settings.neighbours, len(self.means)), dim=1).indices
        task_of = torch.tensor([t for t, task in enumerate(self.tasks) for _ in task])
        candidates = torch.zeros(len(images), len(self.tasks), dtype=torch.bool)
        candidates.scatter_(1, task_of[self.owners[rows]], True)
        classes = self.owners[similarity.argmax(dim=1)]
        owners = self.owners.expand_as(similarity)
        scores = torch.full((len(images), len(self.classes)), -1.0).scatter_reduce(1, owners, similarity, "amax")
        return Answer(classes, candidates, torch.zeros(len(images), dtype=torch.long), scores=scores)
