"""Co2L (Cha et al.): contrastive learning makes embeddings that are forgotten less; a linear head comes afterwards.

Every image of a batch, be it of the task or of the buffer, is augmented twice, embedded, projected by a small
network and normalised: z. Two losses shape the backbone.

Asymmetric supervised contrastive loss: SupCon in which only the task's own images are anchors; those of the buffer
are their negatives, but are pulled nowhere themselves, since there are too few of them to be fitted to:

    L_i = -1/|P(i)| * sum over p in P(i) of log( exp(z_i z_p / tau) / sum over j != i of exp(z_i z_j / tau) )

Instance-wise relation distillation: how similar each image is to all others of the batch, as a softmax of
similarities, is to stay as it was in the network before the task. The temperature of the past is lower than that of
the present, so that the past is sharp:

    L_IRD = mean over i of cross-entropy( softmax(z*_i z*_j / kappa*), softmax(z_i z_j / kappa) ),    j != i

After that a linear head is fitted to the frozen embeddings of buffer and task, classes weighted equally.

Differences from the authors' code: the contrastive loss is a mean over anchors, as in the paper; the code takes the
mean over all images and multiplies by tau / 0.07. The head is the minimum that L-BFGS finds on embeddings of images
as they are; theirs is trained on augmented images by SGD, and draws classes equally often instead of weighting them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.methods.base import Source, TaskData
from protosteer.methods.finetune_base import Rehearsal, RehearsalSettings
from protosteer.methods.training_utils import minimise
from protosteer.paper.losses import contrastive
from protosteer.settings import setting

PROJECTED = 128  # numbers that the projection gives out: the authors' code, networks/resnet_big.py
RIDGE = 1e-4  # of the head, where images can be told apart perfectly; our choice


@dataclass(frozen=True)
class Co2LSettings(RehearsalSettings):
    # All of the authors' code: run.sh (CIFAR-10) and main.py.
    temperature: float = setting(0.5, above=0)  # tau
    present_temperature: float = setting(0.2, above=0)  # kappa
    past_temperature: float = setting(0.01, above=0)  # kappa*
    distillation_weight: float = setting(1.0, at_least=0)
    buffer_size: int = 200


class Co2L(Rehearsal):
    name = "co2l"
    source = Source("Cha et al.", "Co2L: contrastive continual learning", "ICCV", 2021)
    settings_class = Co2LSettings
    settings: Co2LSettings
    trains = "backbone, projection, head"
    views = 2
    past: tuple[Backbone, nn.Module] | None = None  # backbone and projection before the task

    def __init__(self, backbone: Backbone, settings: Co2LSettings):
        super().__init__(backbone, settings)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            wide = nn.Linear(backbone.dim, backbone.dim)
            self.projection = nn.Sequential(wide, nn.ReLU(), nn.Linear(backbone.dim, PROJECTED))
        self.projection.to(backbone.device)

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        if self.tasks:
            frozen = copy.deepcopy(self.projection).requires_grad_(False)
            self.past = self.backbone.frozen_copy(), frozen

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        return self.memory.before(images, labels)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Of two views of each image: [2 * B, 3, H, W], labels [B]."""
        s, embeddings = self.settings, self.backbone.embed(images)
        z, both = F.normalize(self.projection(embeddings), dim=1), labels.repeat(2)
        loss = asymmetric(z, both, both >= len(self.classes), s.temperature)
        if self.past:
            backbone, projection = self.past
            before = F.normalize(projection(backbone.embed(images)), dim=1)
            kept = relations(z, before, s.present_temperature, s.past_temperature)
            loss = loss + s.distillation_weight * kept
        return loss, embeddings[: len(labels)]

    def finish(self, task: TaskData, labels: Tensor, **notes: Tensor) -> None:
        self.past = None
        both, targets = self.memory.before(task.train, labels)
        embeddings = self.backbone.embed_set(both, batch_size=self.settings.embed_batch_size)
        weight, bias = linear(embeddings, targets, len(self.classes))
        self.head.put_back(weight, bias)
        self.memory.share_out(task.train, labels, self.settings.buffer_size)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Of the first stage: the head has no part in it."""
        parts = self.backbone.vit.named_parameters("vit"), self.projection.named_parameters("projection")
        return dict([*parts[0], *parts[1]])

    def extras(self) -> dict[str, Tensor]:
        return {**dict(self.projection.named_parameters("projection")), **super().extras()}

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        start = "projection."
        own = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
        self.projection.load_state_dict(own)
        super().put_back_extras(tensors)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **dict(self.head.named_parameters("head"))}

    def trained_parameters(self) -> int:
        return super().trained_parameters() + sum(p.numel() for p in self.head.parameters())


def asymmetric(z: Tensor, labels: Tensor, anchors: Tensor, temperature: float) -> Tensor:
    """SupCon of z [N, P], labels [N], in which only some images are anchors, bool [N]; 0 if none is."""
    others = ~torch.eye(len(z), dtype=torch.bool, device=z.device)[anchors]
    same = labels[anchors, None] == labels[None, :]
    return contrastive(z[anchors] @ z.T, same & others, others, temperature)


def relations(z: Tensor, before: Tensor, present: float, past: float) -> Tensor:
    """Each image's similarities to all others [N, N - 1] against those before, as softmaxes; both z [N, P]."""
    count = len(z)
    others = ~torch.eye(count, dtype=torch.bool, device=z.device)
    now, then = ((some @ some.T)[others].view(count, count - 1) for some in (z, before))
    return -((then / past).softmax(dim=1) * (now / present).log_softmax(dim=1)).sum(dim=1).mean()


def linear(embeddings: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Logistic regression in which every class has the same weight: [K, D] and [K]."""
    counts = labels.bincount(minlength=classes).clamp(min=1)
    weight = torch.zeros(classes, embeddings.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    minimise(
        lambda: (
            F.cross_entropy(F.linear(embeddings, weight, bias), labels, weight=1 / counts)
            + RIDGE * (weight**2).sum()
        ),
        [weight, bias],
    )
    return weight.detach(), bias.detach()
