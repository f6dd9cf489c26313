"""Co2L (Cha et al.): contrastive learning of embeddings that are forgotten less, and a linear head after it.

Every image of a batch, of the task or of the buffer, is augmented twice, embedded, projected by a small network and
normalised: z. Two losses train the backbone.

Asymmetric supervised contrastive loss: SupCon in which only the task's images are anchors. Images of the buffer are
negatives only, because there are too few of them to fit:

    L_i = -1/|P(i)| * sum over p in P(i) of log( exp(z_i z_p / tau) / sum over j != i of exp(z_i z_j / tau) )

Instance-wise relation distillation: each image's similarities to all others of the batch, as a softmax, stay as they
were before the task. The temperature of the past is lower than that of the present, so the past is sharp:

    L_IRD = mean over i of cross-entropy( softmax(z*_i z*_j / kappa*), softmax(z_i z_j / kappa) ),    j != i

Afterwards a linear head is fitted to the frozen embeddings of buffer and task, with equally weighted classes.

Differences from the authors' code: the contrastive loss is a mean over anchors, as in the paper; the code takes the
mean over all images and multiplies by tau / 0.07. The head is the minimum that L-BFGS finds on embeddings of plain
images; theirs is trained by SGD on augmented images, and samples classes equally often instead of weighting them.
They train a ResNet from random weights by SGD at a rate of 0.5, in batches of 512. The first task has 500 epochs, later
tasks have 100. Epochs, batches and optimiser here are those of `finetune`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.methods.base import Source, TrainingTask, register_method
from protosteer.methods.finetune_base import Network, Rehearsal, RehearsalSettings
from protosteer.methods.training_utils import minimise
from protosteer.paper.losses import contrastive
from protosteer.settings import setting
from protosteer.util.seeded import seeded

PROJECTION_DIM = 128  # the authors' code, networks/resnet_big.py
RIDGE = 1e-4  # of the head, for images that are separable; our choice


@dataclass(frozen=True)
class Co2LSettings(RehearsalSettings):
    """Settings of Co2L; those below are of the authors' code: run.sh (CIFAR-10) and main.py."""

    temperature: float = setting(0.5, above=0)  # tau
    present_temperature: float = setting(0.2, above=0)  # kappa
    past_temperature: float = setting(0.01, above=0)  # kappa*
    distillation_weight: float = setting(1.0, at_least=0)
    buffer_size: int = 200


@register_method("co2l")
class Co2L(Rehearsal):
    """Contrastive rehearsal with relation distillation."""

    source = Source("Cha et al.", "Co2L: contrastive continual learning", "ICCV", 2021)
    trains = "backbone, projection, head"
    settings_class = Co2LSettings
    state_fields = {**Rehearsal.state_fields, "projection": "once"}
    test_settings = {**Network.test_settings, "epochs": 4, "buffer_size": 24}
    settings: Co2LSettings
    views = 2

    def __init__(self, backbone: Backbone, settings: Co2LSettings):
        super().__init__(backbone, settings)
        dim, generator = backbone.dim, self.generator.manual_seed(settings.seed)
        projection = seeded(
            lambda: nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, PROJECTION_DIM)), generator
        )
        self.projection = projection.to(backbone.device)
        # Backbone and projection before the current task; None in the first.
        self.past: tuple[Backbone, nn.Module] | None = None

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Copy the network for distillation."""
        if self.tasks:
            projection = copy.deepcopy(self.projection).requires_grad_(False)
            self.past = self.backbone.frozen_copy(), projection

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """Return buffer and task together."""
        return self.buffer.joined_with(images, labels)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both losses of two views of each image; see `Network.loss`."""
        s, embeddings = self.settings, self.backbone.embed(images)
        z, view_labels = F.normalize(self.projection(embeddings), dim=1), labels.repeat(2)
        loss = asymmetric_loss(z, view_labels, view_labels >= len(self.classes), s.temperature)
        if self.past:
            backbone, projection = self.past
            past_z = F.normalize(projection(backbone.embed(images)), dim=1)
            drift = relation_loss(z, past_z, s.present_temperature, s.past_temperature)
            loss = loss + s.distillation_weight * drift
        return loss, embeddings[: len(labels)]

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Fit the head and update the buffer."""
        self.past = None
        images, targets = self.buffer.joined_with(task.train, labels)
        embeddings = self.backbone.embed_set(images, batch_size=self.settings.embed_batch_size)
        self.head.assign(*fit_head(embeddings, targets, len(self.classes)))
        self.buffer.offer_balanced(task.train, labels, self.settings.buffer_size, self.generator)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the first stage, which has no head."""
        return dict([*self.vit.named_parameters("vit"), *self.projection.named_parameters("projection")])

    def trained_parameters(self) -> int:
        """Return the number of parameters of backbone, projection and head."""
        return super().trained_parameters() + sum(p.numel() for p in self.head.parameters())


def asymmetric_loss(z: Tensor, labels: Tensor, anchors: Tensor, temperature: float) -> Tensor:
    """Compute SupCon of z [N, P] and labels [N] with some images as anchors, bool [N]; 0 if there are none."""
    other_mask = ~torch.eye(len(z), dtype=torch.bool, device=z.device)[anchors]
    same_class = labels[anchors, None] == labels[None, :]
    return contrastive(z[anchors] @ z.T, same_class & other_mask, other_mask, temperature)


def relation_loss(z: Tensor, past_z: Tensor, temperature: float, past_temperature: float) -> Tensor:
    """Compute the cross-entropy of each image's similarities to all others, of z [N, P] against those of z* [N, P]."""
    count = len(z)
    other_mask = ~torch.eye(count, dtype=torch.bool, device=z.device)
    logits, past_logits = ((rows @ rows.T)[other_mask].view(count, count - 1) for rows in (z, past_z))
    targets = (past_logits / past_temperature).softmax(dim=1)
    return -(targets * (logits / temperature).log_softmax(dim=1)).sum(dim=1).mean()


def fit_head(embeddings: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Fit a logistic regression with equally weighted classes; returns weight [K, D] and bias [K]."""
    counts = labels.bincount(minlength=classes).clamp(min=1)
    weight = torch.zeros(classes, embeddings.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)

    def loss() -> Tensor:
        logits = F.linear(embeddings, weight, bias)
        return F.cross_entropy(logits, labels, weight=1 / counts) + RIDGE * (weight**2).sum()

    minimise(loss, [weight, bias])
    return weight.detach(), bias.detach()
