"""Nearest class mean on the frozen backbone (paper, Sec. 3.2), also with several centroids per class.

Nothing is trained: a class is kept as the mean of its training images' embeddings, or as the means of a few
groups of them, and an image belongs to the class whose centroid is most similar to it. More images of a class move
its mean to the mean of all; of several centroids, those of the new images come beside those that there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.training_utils import embedded, numbered, task_seed
from protosteer.paper.prototypes import Centroids, centroids
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import CLUSTERINGS, LABEL_ASSIGNMENTS, Values, setting


@dataclass(frozen=True)
class NCMSettings(Values):
    centroids: int = setting(1, at_least=1, at_most=10_000)  # per class
    clustering: str = setting("spectral", choices=CLUSTERINGS)
    assign_labels: str = setting("discretize", choices=LABEL_ASSIGNMENTS)
    # The tasks of so many nearest centroids count as retrieved.
    neighbours: int = setting(3, at_least=1, at_most=10_000)
    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)
    seed: int = setting(0, at_least=0)


class NCM(Method):
    name = "ncm"
    source = Source(
        "Mensink et al.", "Distance-based image classification: nearest class mean", "TPAMI", 2013
    )
    settings_class = NCMSettings
    again = True

    def __init__(self, backbone: Backbone, settings: NCMSettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim)  # [K, D]: centroids of all classes
        self.owners = torch.empty(0, dtype=torch.long)  # [K]: the class of each
        self.counts = torch.empty(0, dtype=torch.long)  # [K]: the images of each

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        s = self.settings
        classes, labels = numbered(task, self.classes)
        embeddings = embedded(task, self.backbone, s.embed_batch_size, on_stage)
        seed = task_seed(s.seed, classes or [task.name]) % 2**32
        for number in labels.unique():
            own = embeddings[labels == number]
            self._add(number, centroids(own, s.centroids, s.clustering, s.assign_labels, seed))
        self.tasks.append(classes)

    def _add(self, number: Tensor, found: Centroids) -> None:
        known = self.owners == number
        if self.settings.centroids == 1 and known.any():
            self.counts = self.counts + known * found.counts
            shift = (found.means - self.means) * (found.counts / self.counts)[:, None]
            self.means = torch.where(known[:, None], self.means + shift, self.means)
            return
        self.means = torch.cat([self.means, found.means])
        self.owners = torch.cat([self.owners, number.expand(len(found.means))])
        self.counts = torch.cat([self.counts, found.counts])

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        queries = images.embed(torch.arange(len(images)))
        similarity = F.normalize(queries, dim=1) @ F.normalize(self.means, dim=1).T  # [B, K]
        nearest = similarity.topk(min(self.settings.neighbours, len(self.means)), dim=1).indices
        task_of = torch.tensor([t for t, task in enumerate(self.tasks) for _ in task])
        candidates = torch.zeros(len(images), len(self.tasks), dtype=torch.bool)
        candidates.scatter_(1, task_of[self.owners[nearest]], True)
        classes = self.owners[similarity.argmax(dim=1)]
        return Answer(classes, candidates, torch.zeros(len(images), dtype=torch.long))

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "owners": self.owners, "counts": self.counts}

    def bytes_per_task(self) -> list[int]:
        each = self.owners.bincount(minlength=len(self.classes)) * (self.means.shape[1] * 4 + 16)
        return [int(some.sum()) for some in each.split([len(task) for task in self.tasks])]
