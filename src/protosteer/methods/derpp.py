"""Dark experience replay, DER++ (Buzzega et al.): replay images with the logits that the network once gave them.

Dark experience for general continual learning (NeurIPS 2020). The buffer stores each image x with its label y and the
logits z that the network gave it. Each step minimises

    CE(task's batch)  +  alpha * MSE(logits of x now, z)  +  beta * CE(x', y'),

where x and x' are two separate draws from the buffer, each as large as the task's batch and newly augmented. The buffer
is filled by reservoir sampling at every step, with the logits of that step's augmented view. So logits date from all of
the training, and the current task is replayed too.

Differences: the original's head has all classes from the start; this one grows, so z covers the classes of its time, and
the mean of squares runs over those. In the state, the others are NaN. The original trains a ResNet by SGD; epochs, batches
and optimiser here are those of `finetune`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Source, register_method
from protosteer.methods.finetune_base import OnlineRehearsal, RehearsalSettings
from protosteer.settings import setting


@dataclass(frozen=True)
class DERppSettings(RehearsalSettings):
    """Settings of DER++; those below are mammoth's: models/config/derpp.yaml, seq-cifar100 with 500 images."""

    alpha: float = setting(0.3, at_least=0)
    beta: float = setting(0.5, at_least=0)


@register_method("der++")
class DERpp(OnlineRehearsal):
    """Rehearsal of images, labels and logits."""

    source = Source("Buzzega et al.", "Dark experience for general continual learning", "NeurIPS", 2020)
    settings_class = DERppSettings
    supports_repeated_classes = True
    settings: DERppSettings

    def __init__(self, backbone: Backbone, settings: DERppSettings):
        super().__init__(backbone, settings)
        self.batch_logits = torch.empty(0, 0)  # of the last step's batch, [B, K]

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Add the drift of logits and the loss of replayed images; see `Network.loss`."""
        embeddings = self.backbone.embed(images)
        logits = self.head(embeddings)
        value, self.batch_logits = F.cross_entropy(logits, labels), logits.detach().cpu()
        if len(self.buffer):
            views, rows = self.replay(len(labels))
            drift = self.drift(self.head(self.backbone.embed(views)), rows)
            second_views, second_rows = self.replay(len(labels))
            replay_loss, _ = super().loss(second_views, self.buffer.labels[second_rows].to(labels.device))
            value = value + self.settings.alpha * drift + self.settings.beta * replay_loss
        return value, embeddings

    def notes(self) -> dict[str, Tensor]:
        """Store the logits of the last step's batch."""
        return {"logits": self.batch_logits}

    def drift(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Compute the mean squared difference of logits [b, K] to those stored in rows [b]."""
        stored_logits = self.buffer.notes["logits"][rows].to(logits.device)  # [b, fewer than K]
        mask = ~stored_logits.isnan()
        return (logits[:, : stored_logits.shape[1]] - stored_logits)[mask].square().mean()
