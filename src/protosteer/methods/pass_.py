"""PASS (Zhu et al., CVPR 2021): prototype augmentation and self-supervision.

The whole network is trained on the sum of three losses:

    cross-entropy of images rotated by 0, 90, 180 and 270 degrees, where a class and a rotation together are a class:
    row 4 k + r of the head for class k and rotation r (self-supervision by augmented labels)
  + distill_weight * | F - F' |, the distance between the batch's features and those of the network before the task
  + prototype_weight * cross-entropy of prototypes of earlier classes, with row 4 k as target. A prototype is the mean
    of its class's features after its own task, drawn at random and moved by Gaussian noise: mu_k + r e

The radius r is that of the first task: r^2 is the mean, over its classes, of trace(covariance) / D. Logits are divided
by a temperature. At test time only the rows of rotation 0 count. Prototypes are never updated while the backbone
changes.

Differences: the rate falls along a cosine instead of in two steps, and prototypes are means of images under the evaluation
transform, not of augmented ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Source, TrainingTask, register_method
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import TrainingSettings, answer_by, embed_task
from protosteer.settings import setting

ROTATIONS = 4


@dataclass(frozen=True)
class PASSSettings(TrainingSettings):
    """Settings of PASS.

    Defaults are the authors' for Split CIFAR-100 (main.py and PASS.py of their code), except for the learning rate.
    """

    epochs: int = 101
    batch_size: int = 64  # also of prototypes
    learning_rate: float = 1e-4  # for a ViT: the appendix of CPP; the authors' ResNet has 1e-3
    schedule: str = "cosine"
    weight_decay: float = 2e-4
    distill_weight: float = setting(10.0, at_least=0)
    prototype_weight: float = setting(10.0, at_least=0)
    temperature: float = setting(0.1, above=0)


@register_method("pass")
class PASS(Network):
    """Fine-tuning on rotations, with feature distillation and augmented prototypes."""

    source = Source("Zhu et al.", "Prototype augmentation and self-supervision for incremental learning", "CVPR", 2021)
    settings_class = PASSSettings
    published = {"split-cifar100": {}, "imagenet-subset": {}, "tiny-imagenet": {}}
    published_source = (
        "CPP's appendix (learning rate); main.py, main_PASS_imagenet.py and main_tiny.py of the authors' code"
    )
    state_fields = {**Network.state_fields, "prototypes": "per class", "radius": "once"}
    test_settings = {**Network.test_settings, "learning_rate": 1e-2, "distill_weight": 0.1, "prototype_weight": 1.0}
    optimiser_class = torch.optim.Adam
    distils = True
    settings: PASSSettings

    def __init__(self, backbone: Backbone, settings: PASSSettings):
        super().__init__(backbone, settings)
        self.prototypes = torch.empty(0, backbone.dim)  # [K, D]
        self.radius = torch.tensor(0.0)  # the scale of the noise

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Add the head's rows of rotated classes."""
        super().begin_task(task, labels)
        # With the row per class that `Network` adds, there is one for each class and rotation.
        self.head.grow((ROTATIONS - 1) * len(labels.unique()), self.generator)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the three losses; see `Network.loss`."""
        s = self.settings
        views, targets = rotate(images, labels)
        features = self.backbone.embed(views)
        value = F.cross_entropy(self.head(features) / s.temperature, targets)
        if self.teacher:
            prototypes, owners = self.draw(s.batch_size)
            distance = (features - self.teacher.backbone.embed(views)).norm()
            replay_loss = F.cross_entropy(self.head(prototypes) / s.temperature, ROTATIONS * owners.to(labels.device))
            value = value + s.distill_weight * distance + s.prototype_weight * replay_loss
        return value, features[: len(images)]

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw prototypes moved by noise [count, D], and their classes [count]."""
        owners = torch.randint(len(self.prototypes), (count,), generator=self.generator)
        noise = torch.randn(count, self.backbone.dim, generator=self.generator)
        return self.prototypes[owners] + self.radius * noise, owners

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Compute the prototypes of the task's classes; on the first task, the radius too."""
        features = embed_task(task, self.backbone, self.embed_batch_size, "prototypes")
        by_class = [features[labels == number] for number in labels.unique()]
        if len(self.tasks) == 1:
            self.radius = radius(by_class)
        self.prototypes = torch.cat([self.prototypes, torch.stack([rows.mean(dim=0) for rows in by_class])])

    def answer(self, images: Images) -> Answer:
        """Predict the class of the largest logit among the rows of rotation 0."""
        logits = self.head(images.embed(torch.arange(len(images))))[:, ::ROTATIONS]
        return answer_by(logits / self.settings.temperature)


def rotate(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images [B, 3, H, H] in all rotations, one after the other, and their rows of the head [4 B]."""
    turns = range(ROTATIONS)
    views = torch.cat([torch.rot90(images, turn, (2, 3)) for turn in turns])
    return views, torch.cat([ROTATIONS * labels + turn for turn in turns])


def radius(classes: Sequence[Tensor]) -> Tensor:
    """Compute the root of the mean variance of several classes' features [n, D]; one image has none."""
    variances = [rows.var(dim=0, correction=min(1, len(rows) - 1)).mean() for rows in classes]
    return torch.stack(variances).mean().sqrt()
