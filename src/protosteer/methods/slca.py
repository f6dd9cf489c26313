"""SLCA: a slow learner with classifier alignment (Zhang et al., ICCV 2023).

The slow learner: the backbone is trained by a far smaller rate than the head, on cross-entropy over the task's
own classes, so that its features change little. Afterwards every class of the task is kept as a Gaussian of its
features: mean mu and covariance S + 1e-4 I, by a Cholesky factor of D * D numbers.

Alignment: rows of the head from different tasks have never been compared, so after every task but the first the
head is trained alone, on features drawn from the Gaussians of all classes, by cross-entropy over the logits

    l / (n T),    n the mean, over tasks, of the norm of the logits of a task's classes

as in the authors' code (in the paper n is the norm of all logits). Around the means of task t (1, 2, ...) it
draws after scaling them by 0.9 + 0.1 t / tasks, likewise from the code. The next task goes on with the head as
it was before the alignment, so both are kept.

Different here: the rate of training is not lowered for its last epochs, gradients are clipped as everywhere in
this package, and new rows of the head begin as torch's linear layers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Source, TaskData
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import Head, Training, embedded, task_seed
from protosteer.paper.trainer import cosine
from protosteer.settings import setting

RIDGE = 1e-4  # added to covariances by the authors' code


@dataclass(frozen=True)
class SLCASettings(Training):
    """The authors' for Split CIFAR-100 (models/slca.py, exps/slca/slca_cifar.json of their code)."""

    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 1e-2  # of the head
    backbone_rate: float = setting(1e-2, at_least=0)  # of the backbone, as a share of it
    momentum: float = setting(0.9, at_least=0)
    weight_decay: float = 5e-4
    align_epochs: int = setting(5, at_least=0, at_most=100_000)
    align_draws: int = setting(256, at_least=1, at_most=2**16)  # per class and epoch, and per step
    temperature: float = setting(0.1, above=0)  # T


class SLCA(Network):
    name = "slca"
    source = Source(
        "Zhang et al.",
        "SLCA: slow learner with classifier alignment for continual learning on a pre-trained model",
        "ICCV",
        2023,
    )
    settings_class = SLCASettings
    settings: SLCASettings

    def __init__(self, backbone: Backbone, settings: SLCASettings):
        super().__init__(backbone, settings)
        self.trained = Head(backbone.dim, backbone.device)  # as training left it; `head` is aligned
        self.means = torch.empty(0, backbone.dim)  # [K, D]
        self.factors = torch.empty(0, backbone.dim, backbone.dim)  # [K, D, D]: Cholesky's, of covariances

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        self.head.put_back(*self._rows(self.trained))

    def optimiser(self) -> torch.optim.Optimizer:
        s = self.settings
        slow = {"params": list(self.backbone.vit.parameters()), "lr": s.learning_rate * s.backbone_rate}
        head = {"params": list(self.head.parameters()), "lr": s.learning_rate}
        return torch.optim.SGD(
            [slow, head], s.learning_rate, momentum=s.momentum, weight_decay=s.weight_decay
        )

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        embeddings, known = self.backbone.embed(images), len(self.trained.bias)
        return F.cross_entropy(self.head(embeddings)[:, known:], labels - known), embeddings

    def finish(self, task: TaskData, labels: Tensor) -> None:
        known, (weight, bias) = len(self.trained.bias), self._rows(self.head)
        if known:  # rows of earlier tasks are not trained, but weight decay has shrunk them
            weight[:known], bias[:known] = self._rows(self.trained)
        self.trained.put_back(weight, bias)
        embeddings = embedded(task, self.backbone, self.embed_batch_size).double()
        for number in labels.unique():
            mean, factor = gaussian(embeddings[labels == number])
            self.means = torch.cat([self.means, mean[None].float()])
            self.factors = torch.cat([self.factors, factor[None].float()])
        self.head.put_back(*self._rows(self.trained))
        if known:
            torch.manual_seed(task_seed(self.settings.seed, self.tasks[-1]))
            self.align()

    @staticmethod
    def _rows(head: Head) -> tuple[Tensor, Tensor]:
        """Copies, so that no two heads are trained as one."""
        return head.weight.detach().clone(), head.bias.detach().clone()

    def align(self) -> None:
        """Train the head on features drawn from all classes; random by torch's generator."""
        s, device = self.settings, self.head.weight.device
        labels = torch.arange(len(self.means)).repeat_interleave(s.align_draws)
        optimiser = torch.optim.SGD(
            self.head.parameters(), s.learning_rate, momentum=s.momentum, weight_decay=s.weight_decay
        )
        for epoch in range(s.align_epochs):
            optimiser.param_groups[0]["lr"] = cosine(epoch, s.align_epochs + 1, s.learning_rate, 0.0)
            features = self.draw()
            for rows in torch.randperm(len(labels)).split(s.align_draws):
                logits = self.normalised(self.head(features[rows]))
                optimiser.zero_grad()
                F.cross_entropy(logits, labels[rows].to(device)).backward()
                optimiser.step()

    def draw(self) -> Tensor:
        """[K * draws, D]: features of every class, one class after the other."""
        task_of = torch.tensor([t for t, task in enumerate(self.tasks) for _ in task])
        scale = 0.9 + 0.1 * (task_of + 1) / len(self.tasks)
        noise = torch.randn(len(self.means), self.settings.align_draws, self.backbone.dim)
        centres = (scale[:, None] * self.means)[:, None]  # [K, 1, D]
        return (centres + noise @ self.factors.mT).flatten(0, 1)

    def normalised(self, logits: Tensor) -> Tensor:
        """Logits [B, K] by the mean of their norms within tasks, and the temperature."""
        norms = [some.norm(dim=1) for some in logits.split([len(task) for task in self.tasks], dim=1)]
        return logits / (torch.stack(norms).mean(dim=0)[:, None] + 1e-7) / self.settings.temperature

    def extras(self) -> dict[str, Tensor]:
        weight, bias = self._rows(self.trained)
        return {"means": self.means, "factors": self.factors, "trained.weight": weight, "trained.bias": bias}

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        self.means, self.factors = tensors["means"], tensors["factors"]
        self.trained.put_back(tensors["trained.weight"], tensors["trained.bias"])

    def bytes_per_task(self) -> list[int]:
        """Every class brings a row of both heads and a Gaussian, the first task the network."""
        dim = self.backbone.dim
        rows = [4 * len(task) * (2 * (dim + 1) + dim + dim * dim) for task in self.tasks]
        return [rows[0] + 4 * self.backbone.parameters, *rows[1:]] if rows else []


def gaussian(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows [n, D], the mean [D] and the Cholesky factor [D, D] of their covariance and a ridge."""
    apart = rows - rows.mean(dim=0)
    covariance = apart.T @ apart / max(1, len(rows) - 1)
    return rows.mean(dim=0), torch.linalg.cholesky(covariance + RIDGE * torch.eye(rows.shape[1]).to(rows))
