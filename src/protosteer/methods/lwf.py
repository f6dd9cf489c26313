"""Learning without forgetting (Li and Hoiem): distillation of the old classes' logits on new images.

The network before the task gives every new image logits for the old classes. While the task is learned, the network's
own logits for them are held to these by distillation with temperature T, so no old image is needed:

    L = cross-entropy over all classes so far + lambda * distillation over the old classes

The paper knows the task at test time, so its cross-entropy runs over the new task's classes alone, and each old task is
distilled separately. Here an image is classified among all classes, so both run over all of them. Otherwise nothing
would compare new with old, and a task of one class would teach nothing. The paper's warm-up of the new rows, with all
else frozen, is omitted, and the teacher sees the same augmented image as the network. The paper trains an AlexNet by SGD;
epochs, batches and optimiser here are those of `finetune`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from protosteer.methods.base import Source, register_method
from protosteer.methods.finetune_base import Network, distillation
from protosteer.methods.training_utils import TrainingSettings
from protosteer.settings import setting


@dataclass(frozen=True)
class LwFSettings(TrainingSettings):
    """Settings of LwF; those below are of the authors' code, gridSearchPASCAL.m."""

    temperature: float = setting(2.0, above=0)
    distillation_weight: float = setting(1.0, at_least=0)


@register_method("lwf")
class LwF(Network):
    """Fine-tuning with distillation from the network before the task."""

    source = Source("Li and Hoiem", "Learning without forgetting", "ECCV", 2016)
    settings_class = LwFSettings
    supports_repeated_classes = True
    distils = True
    settings: LwFSettings

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cross-entropy and distillation; see `Network.loss`."""
        s, embeddings = self.settings, self.backbone.embed(images)
        logits = self.head(embeddings)
        loss = F.cross_entropy(logits, labels)
        if self.teacher:
            old_logits = self.teacher(images)
            drift = distillation(logits[:, : old_logits.shape[1]], old_logits, s.temperature)
            loss = loss + s.distillation_weight * drift
        return loss, embeddings
