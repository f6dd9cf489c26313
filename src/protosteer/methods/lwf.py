"""Learning without forgetting (Li and Hoiem): new images are to look to the old classes as they did before.

The network as it was before the task answers every new image with logits for the old classes. While the task is
learned, the network's own logits for them are held to these by distillation with temperature T, so that no old
image is needed:

    L = cross-entropy over all classes so far + lambda * distillation over the old classes

The paper knows the task at test time. So its cross-entropy runs over the new task's classes alone, and each old
task is distilled by itself. Here an image is to be told from all classes, so both run over all that there are; else
nothing would compare new with old, and a task of one class would teach nothing. The paper's warm-up of the new
rows, with all else frozen, is left out, and the teacher sees the same augmented image as the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from protosteer.methods.base import Source, TaskData
from protosteer.methods.distillation import Teacher, distillation
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import Training
from protosteer.settings import setting


@dataclass(frozen=True)
class LwFSettings(Training):
    # Both of the authors' code, gridSearchPASCAL.m.
    temperature: float = setting(2.0, above=0)
    distillation_weight: float = setting(1.0, at_least=0)


class LwF(Network):
    name = "lwf"
    source = Source("Li and Hoiem", "Learning without forgetting", "ECCV", 2016)
    settings_class = LwFSettings
    again = True
    settings: LwFSettings
    teacher: Teacher | None = None  # none in the first task

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        self.teacher = Teacher(self.backbone, self.head) if self.tasks else None

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        s, embeddings = self.settings, self.backbone.embed(images)
        logits = self.head(embeddings)
        loss = F.cross_entropy(logits, labels)
        if self.teacher:
            old = self.teacher(images)
            loss = loss + s.distillation_weight * distillation(logits[:, : old.shape[1]], old, s.temperature)
        return loss, embeddings

    def finish(self, task: TaskData, labels: Tensor) -> None:
        self.teacher = None
