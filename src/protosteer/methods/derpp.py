"""Dark experience replay: old images keep not only their labels, but also what the network once said of them.

Buzzega et al., Dark experience for general continual learning (NeurIPS 2020), there called DER++. With every
image x of the buffer are kept its label y and the logits z that the network gave it. Each step minimises

    CE(task's batch)  +  alpha * MSE(logits of x now, z)  +  beta * CE(x', y'),

where x and x' are two separate draws from the buffer, as many images each as the task's batch has, augmented
anew. The buffer is filled by reservoir sampling.

Different here: the original offers images to the buffer at every step with the logits of that moment and that
augmented view. Here both are kept when the task is over, logits of the image by the evaluation transform. The
original's head has all classes from the beginning; this one grows, so that z has the classes of its time: the
squared differences are averaged over those classes alone. In the state, the others are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.methods.base import Source, TaskData
from protosteer.methods.finetune_base import Rehearsal, RehearsalSettings
from protosteer.methods.training_utils import embedded
from protosteer.settings import setting


@dataclass(frozen=True)
class DERppSettings(RehearsalSettings):
    # The authors' code, mammoth: models/config/derpp.yaml, seq-cifar100 with 500 images.
    alpha: float = setting(0.3, at_least=0)
    beta: float = setting(0.5, at_least=0)


class DERpp(Rehearsal):
    name = "der++"
    source = Source("Buzzega et al.", "Dark experience for general continual learning", "NeurIPS", 2020)
    settings_class = DERppSettings
    again = True
    settings: DERppSettings

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        value, embeddings = super().loss(images, labels)
        if len(self.memory):
            views, rows = self.replayed(len(labels))
            drift = self.drift(self.head(self.backbone.embed(views)), rows)
            again, which = self.replayed(len(labels))
            repeated, _ = super().loss(again, self.memory.labels[which].to(labels.device))
            value = value + self.settings.alpha * drift + self.settings.beta * repeated
        return value, embeddings

    def drift(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Mean squared difference of logits [b, K] to those kept in rows [b], over the classes of their time."""
        kept = self.memory.notes["logits"][rows].to(logits.device)  # [b, fewer than K]
        there = ~kept.isnan()
        return (logits[:, : kept.shape[1]] - kept)[there].square().mean()

    def finish(self, task: TaskData, labels: Tensor, **notes: Tensor) -> None:
        with torch.no_grad():
            logits = self.head(embedded(task, self.backbone, self.embed_batch_size)).cpu()  # [n, K]
        earlier = self.memory.notes.get("logits", logits[:0])
        wider = (0, logits.shape[1] - earlier.shape[1])
        self.memory.notes["logits"] = F.pad(earlier, wider, value=torch.nan)
        super().finish(task, labels, logits=logits)
