"""PASS: prototype augmentation and self-supervision (Zhu et al., CVPR 2021).

The whole network is trained, on the sum of three losses:

    cross-entropy of images turned by 0, 90, 180 and 270 degrees, a class with its rotation being a class by
    itself: row 4 k + r of the head for class k and rotation r (self-supervision by augmented labels)
  + distill_weight * | F - F' |, the distance between all features of the batch and those that the network gave
    before the task
  + prototype_weight * cross-entropy of prototypes of earlier classes, each the mean of its class's features
    after its own task, drawn at random and moved by Gaussian noise: mu_k + r e, to be told as row 4 k

The radius r is that of the first task: r^2 is the mean, over its classes, of trace(covariance) / D. Logits are
divided by a temperature. At test time only the rows of rotation 0 count. Prototypes are never renewed while the
backbone moves: that is the method.

Different here: the rate falls along a cosine instead of in two steps, gradients are clipped as everywhere in
this package, and prototypes are means of images as they are tested, not of augmented ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Source, TaskData
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import Training, answer_by, embedded
from protosteer.settings import setting

ROTATIONS = 4


@dataclass(frozen=True)
class PASSSettings(Training):
    """The authors' for Split CIFAR-100 (main.py and PASS.py of their code), but for the learning rate."""

    epochs: int = 101
    batch_size: int = 64  # also of prototypes
    learning_rate: float = 1e-4  # for a ViT: the appendix of CPP; the authors' ResNet has 1e-3
    schedule: str = "cosine"
    weight_decay: float = 2e-4
    distill_weight: float = setting(10.0, at_least=0)
    prototype_weight: float = setting(10.0, at_least=0)
    temperature: float = setting(0.1, above=0)


class PASS(Network):
    name = "pass"
    source = Source(
        "Zhu et al.", "Prototype augmentation and self-supervision for incremental learning", "CVPR", 2021
    )
    settings_class = PASSSettings
    settings: PASSSettings

    def __init__(self, backbone: Backbone, settings: PASSSettings):
        super().__init__(backbone, settings)
        self.prototypes = torch.empty(0, backbone.dim)  # [K, D]
        self.radius = torch.tensor(0.0)
        self.before: Backbone | None = None  # the network before the task that is being learned

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        self.before = self.backbone.frozen_copy() if self.tasks else None
        # With the rows that every network gets, these are one for each class and rotation.
        self.head.grow((ROTATIONS - 1) * len(labels.unique()))

    def optimiser(self) -> torch.optim.Optimizer:
        s = self.settings
        return torch.optim.Adam(self.parameters().values(), s.learning_rate, weight_decay=s.weight_decay)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        s = self.settings
        views, targets = rotated(images, labels)
        features = self.backbone.embed(views)
        value = F.cross_entropy(self.head(features) / s.temperature, targets)
        if self.before is not None:
            moved, owners = self.draw(s.batch_size)
            apart = (features - self.before.embed(views)).norm()
            told = F.cross_entropy(self.head(moved) / s.temperature, ROTATIONS * owners.to(labels.device))
            value = value + s.distill_weight * apart + s.prototype_weight * told
        return value, features[: len(images)]

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Prototypes moved by noise [count, D], and their classes [count]; by torch's generator."""
        owners = torch.randint(len(self.prototypes), (count,))
        return self.prototypes[owners] + self.radius * torch.randn(count, self.backbone.dim), owners

    def finish(self, task: TaskData, labels: Tensor) -> None:
        self.before = None
        features = embedded(task, self.backbone, self.embed_batch_size)
        own = [features[labels == number] for number in labels.unique()]
        if len(self.tasks) == 1:
            self.radius = radius(own)
        self.prototypes = torch.cat([self.prototypes, torch.stack([some.mean(dim=0) for some in own])])

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        logits = self.head(images.embed(torch.arange(len(images))))[:, ::ROTATIONS]
        return answer_by(logits / self.settings.temperature)

    def extras(self) -> dict[str, Tensor]:
        return {"prototypes": self.prototypes, "radius": self.radius}

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        self.prototypes, self.radius = tensors["prototypes"], tensors["radius"]

    def bytes_per_task(self) -> list[int]:
        """Every class brings its rows of the head and a prototype, the first task the network and the radius."""
        dim = self.backbone.dim
        rows = [4 * len(task) * (ROTATIONS * (dim + 1) + dim) for task in self.tasks]
        return [rows[0] + 4 * self.backbone.parameters + self.radius.nbytes, *rows[1:]] if rows else []


def rotated(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """All images [B, 3, H, H], then all turned by 90 degrees, and so on; with their rows of the head [4 B]."""
    turns = range(ROTATIONS)
    views = torch.cat([torch.rot90(images, turn, (2, 3)) for turn in turns])
    return views, torch.cat([ROTATIONS * labels + turn for turn in turns])


def radius(classes: Sequence[Tensor]) -> Tensor:
    """Of the features [n, D] of several classes: the root of their mean variance; one image has none."""
    variances = [some.var(dim=0, correction=min(1, len(some) - 1)).mean() for some in classes]
    return torch.stack(variances).mean().sqrt()
