"""Methods that keep the plain embedding of every image they learn from: all but what they make of them."""

from __future__ import annotations

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Method, TaskData
from protosteer.methods.training_utils import embedded, numbered
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import Values


class KeepsEmbeddings(Method):
    """Embeddings of the frozen backbone in float32, as they are, with the number of each one's class."""

    grows = True
    again = True

    def __init__(self, backbone: Backbone, settings: Values):
        super().__init__(backbone, settings)
        self.embeddings = torch.empty(0, backbone.dim)  # [N, D]
        self.labels = torch.empty(0, dtype=torch.long)  # [N]

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        classes, labels = numbered(task, self.classes)
        new = embedded(task, self.backbone, self.embed_batch_size, on_stage)
        self.embeddings = torch.cat([self.embeddings, new])
        self.labels = torch.cat([self.labels, labels])
        self.tasks.append(classes)

    def tensors(self) -> dict[str, Tensor]:
        return {"embeddings": self.embeddings, "labels": self.labels}

    def bytes_per_task(self) -> list[int]:
        each = self.labels.bincount(minlength=len(self.classes)) * (4 * self.backbone.dim + 8)
        return [int(some.sum()) for some in each.split([len(task) for task in self.tasks])]
