"""iCaRL (Rebuffi et al.): exemplars of every class, distillation, and the nearest mean of exemplars.

iCaRL: incremental classifier and representation learning (CVPR 2017).

- Training: each class has its own sigmoid, under binary cross-entropy, on the task's images and all exemplars together.
  The target of a new class is whether the image belongs to it. The target of an old class is the output of the network
  before the task, for every image, exemplars included.
- Exemplars: buffer_size // classes of each class, in the order of herding: the next one is the image that brings the
  mean of those chosen nearest to the class mean, on unit-length features. When there are more classes, the first of
  each list stay.
- Prediction: the class whose mean of exemplars, embedded by the current network, is nearest to the image's features, all
  of unit length. The sigmoids are for training only.

Differences: the authors' code averages exemplars with their mirror images; this is omitted, because mirroring turns
some images, such as digits, into something else. Their small network is trained from random weights by SGD for 70
epochs; here it is pre-trained weights and AdamW, with learning rate and memory as in CPP's appendix. The loss is
averaged over the classes so far, not over all that will ever be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.errors import SettingsError
from protosteer.methods.base import Answer, Images, Source, TrainingTask, register_method
from protosteer.methods.finetune_base import Rehearsal, RehearsalSettings
from protosteer.methods.training_utils import class_means, embed_task


@dataclass(frozen=True)
class ICaRLSettings(RehearsalSettings):
    """Settings of iCaRL."""

    learning_rate: float = 1e-4  # CPP's appendix, where iCaRL has a pre-trained ViT
    buffer_size: int = 2000  # CPP's appendix, and the paper's for CIFAR-100
    batch_size: int = 128  # the authors' code for CIFAR-100


@register_method("icarl")
class ICaRL(Rehearsal):
    """Rehearsal of herded exemplars with distillation; predicts by their means."""

    source = Source("Rebuffi et al.", "iCaRL: incremental classifier and representation learning", "CVPR", 2017)
    settings_class = ICaRLSettings
    published = {
        "split-cifar100": {"epochs": 70},
        "imagenet-subset": {"epochs": 60},
    }
    published_source = (
        "CPP's appendix (buffer, learning rate); the authors' code (epochs: 70 for CIFAR-100, 60 for ImageNet)"
    )
    state_fields = {**Rehearsal.state_fields, "means": "once"}
    distils = True
    settings: ICaRLSettings

    def __init__(self, backbone: Backbone, settings: ICaRLSettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, backbone.dim)  # unit-length means of exemplars, [K, D]

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Check that the buffer can hold an exemplar of each class."""
        classes, size = int(labels.max()) + 1, self.settings.buffer_size
        if size < classes:
            message = f"buffer_size = {size}: {classes} classes need an exemplar each; set at least {classes}"
            raise SettingsError(message, code="buffer-too-small", name="buffer_size")
        super().begin_task(task, labels)

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """Return buffer and task together."""
        return self.buffer.joined_with(images, labels)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the binary cross-entropy against labels and the teacher; see `Network.loss`."""
        embeddings = self.backbone.embed(images)
        logits = self.head(embeddings)
        targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        if self.teacher:
            old_targets = self.teacher(images).sigmoid()
            targets[:, : old_targets.shape[1]] = old_targets
        return F.binary_cross_entropy_with_logits(logits, targets), embeddings

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Choose the exemplars and compute their means."""
        per_class = self.settings.buffer_size // len(self.classes)
        features = F.normalize(embed_task(task, self.backbone, self.embed_batch_size, "exemplars"), dim=1)
        rows = [(self.buffer.labels == label).nonzero()[:per_class, 0] for label in self.buffer.labels.unique()]
        for label in labels.unique():
            class_rows = (labels == label).nonzero()[:, 0]
            rows.append(len(self.buffer) + class_rows[herding(features[class_rows], per_class)])
        self.buffer.offer(task.train, labels, torch.cat(rows))
        exemplars = self.backbone.embed_set(self.buffer.images, batch_size=self.embed_batch_size)
        self.means = F.normalize(class_means(F.normalize(exemplars, dim=1), self.buffer.labels), dim=1)

    def answer(self, images: Images) -> Answer:
        """Predict the class with the nearest mean of exemplars."""
        features = F.normalize(images.embed(torch.arange(len(images))), dim=1)
        scores = features @ self.means.T
        return Answer(scores.argmax(dim=1), scores=scores)


def herding(features: Tensor, count: int) -> Tensor:
    """Choose at most `count` rows of unit-length features [n, D] whose mean stays nearest to the mean of all.

    After k choices with the sum s, the next one minimises |mean - (s + f) / (k + 1)|. For all f of the same length, that
    is the f with the largest product with (k + 1) mean - s.
    """
    features = features.double()
    target = mean = features.mean(dim=0)
    is_free = torch.ones(len(features), dtype=torch.bool)
    rows = []
    for _ in range(min(count, len(features))):
        row = int(torch.where(is_free, features @ target, -torch.inf).argmax())
        is_free[row] = False
        rows.append(row)
        target = target + mean - features[row]
    return torch.tensor(rows, dtype=torch.long)
