"""Base class of methods that store the embedding of every training image."""

from __future__ import annotations

import torch

from protosteer.backbones import Backbone
from protosteer.methods.base import Method, TrainingTask
from protosteer.methods.training_utils import embed_task, number_labels
from protosteer.settings import Values


class FeatureBank(Method):
    """Stores embeddings of the frozen backbone in float32, with their class numbers.

    Attributes:
        embeddings: [N, D].
        labels: Class numbers, int64 [N].
    """

    state_grows = True
    stored_features = "all"
    supports_repeated_classes = True
    state_fields = {"embeddings": "labels", "labels": "labels"}

    def __init__(self, backbone: Backbone, settings: Values):
        super().__init__(backbone, settings)
        self.embeddings = torch.empty(0, backbone.dim)
        self.labels = torch.empty(0, dtype=torch.long)

    def learn(self, task: TrainingTask) -> None:
        """Store the task's embeddings."""
        classes, labels = number_labels(task, self.classes)
        embeddings = embed_task(task, self.backbone, self.embed_batch_size)
        self.embeddings = torch.cat([self.embeddings, embeddings])
        self.labels = torch.cat([self.labels, labels])
        self.tasks.append(classes)
