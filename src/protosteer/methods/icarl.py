"""iCaRL: exemplars of every class, distillation, and the nearest mean of exemplars.

Rebuffi et al., iCaRL: incremental classifier and representation learning (CVPR 2017).

- Training: each class has a sigmoid of its own, under binary cross-entropy. The task's images and all
  exemplars are trained on together; the target of a new class is whether the image belongs to it, the target
  of an old class is what the network said before the task, for every image, exemplars included.
- Exemplars: buffer_size // classes of each class, in the order of herding: the next one is the image that
  brings the mean of those chosen nearest to the class mean, on features of length one. When classes become
  more, the first of each list stay.
- Prediction: the class whose mean of exemplars, as the network of now sees them, is nearest to the image's
  features, all of length one. The sigmoids serve training alone.

Different here: the authors' code averages exemplars with their mirror images; that is left out, because a
mirror turns some images, such as digits, into something else. Their small network is trained from random
weights by SGD for 70 epochs; here it is pre-trained weights and AdamW, with learning rate and memory as in
CPP's appendix. The loss is averaged over the classes so far, not over all that will ever be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.errors import SettingsError
from protosteer.methods.base import Answer, Images, Source, TaskData
from protosteer.methods.distillation import Teacher
from protosteer.methods.finetune_base import Rehearsal, RehearsalSettings
from protosteer.methods.training_utils import embedded


@dataclass(frozen=True)
class ICaRLSettings(RehearsalSettings):
    learning_rate: float = 1e-4  # CPP's appendix, where iCaRL has a pre-trained ViT
    buffer_size: int = 2000  # CPP's appendix, and the paper's for CIFAR-100
    batch_size: int = 128  # the authors' code for CIFAR-100


class ICaRL(Rehearsal):
    name = "icarl"
    source = Source(
        "Rebuffi et al.", "iCaRL: incremental classifier and representation learning", "CVPR", 2017
    )
    settings_class = ICaRLSettings
    settings: ICaRLSettings

    def __init__(self, backbone: Backbone, settings: ICaRLSettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim)  # [K, D], of length one
        self.teacher: Teacher | None = None  # the network before the task that is being learned

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        classes, size = int(labels.max()) + 1, self.settings.buffer_size
        if size < classes:
            raise SettingsError(
                f"buffer_size = {size}: {classes} classes need an exemplar each; set at least {classes}"
            )
        if self.tasks:
            self.teacher = Teacher(self.backbone, self.head)

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        return self.memory.before(images, labels)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self.backbone.embed(images)
        logits = self.head(embeddings)
        targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        if self.teacher:
            old = self.teacher(images).sigmoid()
            targets[:, : old.shape[1]] = old
        return F.binary_cross_entropy_with_logits(logits, targets), embeddings

    def finish(self, task: TaskData, labels: Tensor, **notes: Tensor) -> None:
        self.teacher = None
        each = self.settings.buffer_size // len(self.classes)
        features = F.normalize(embedded(task, self.backbone, self.embed_batch_size, None, "exemplars"), dim=1)
        rows = [(self.memory.labels == label).nonzero()[:each, 0] for label in self.memory.labels.unique()]
        for label in labels.unique():
            own = (labels == label).nonzero()[:, 0]
            rows.append(len(self.memory) + own[herding(features[own], each)])
        self.memory.offer(task.train, labels, torch.cat(rows))
        self.means = self.means_of_exemplars()

    def means_of_exemplars(self) -> Tensor:
        exemplars = self.backbone.embed_set(self.memory.images, batch_size=self.embed_batch_size)
        exemplars, labels = F.normalize(exemplars, dim=1), self.memory.labels
        means = [exemplars[labels == label].mean(dim=0) for label in range(len(self.classes))]
        return F.normalize(torch.stack(means), dim=1)

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        features = F.normalize(images.embed(torch.arange(len(images))), dim=1)
        return Answer((features @ self.means.T).argmax(dim=1))

    def extras(self) -> dict[str, Tensor]:
        return {**super().extras(), "means": self.means}

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        super().put_back_extras(tensors)
        self.means = tensors["means"]


def herding(features: Tensor, count: int) -> Tensor:
    """Rows [at most count] of features [n, D] of length one, in the order in which they are chosen.

    After k choices with the sum s, the next one minimises |mean - (s + f) / (k + 1)|. For all f of one length
    that is the f with the largest product with (k + 1) mean - s.
    """
    features = features.double()
    wanted = mean = features.mean(dim=0)
    free = torch.ones(len(features), dtype=torch.bool)
    rows = []
    for _ in range(min(count, len(features))):
        best = int(torch.where(free, features @ wanted, -torch.inf).argmax())
        free[best] = False
        rows.append(best)
        wanted = wanted + mean - features[best]
    return torch.tensor(rows, dtype=torch.long)
