"""SLCA (Zhang et al., ICCV 2023): a slow learner with classifier alignment.

Slow learner: the backbone is trained at a far smaller rate than the head, on cross-entropy over the task's own classes,
so its features change little. Afterwards every class of the task is stored as a Gaussian of its features: mean mu and
covariance S + 1e-4 I, as a Cholesky factor of D * D numbers.

Alignment: the head's rows of different tasks were never compared. So after every task but the first, the head alone is
trained on features drawn from the Gaussians of all classes, by cross-entropy over the logits

    l / (n T),    n the mean, over tasks, of the norm of the logits of a task's classes

as in the authors' code (in the paper, n is the norm of all logits). Before drawing, the means of task t (1, 2, ...) are
scaled by 0.9 + 0.1 t / tasks, likewise from the code. The next task continues with the head before alignment, so both
are stored.

As there, rates fall to a tenth at a milestone: epoch 18 of 20. Difference: new rows of the head are initialised as
torch's linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Source, TrainingTask, register_method
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import Head, TrainingSettings, embed_task, task_seed
from protosteer.paper.trainer import cosine
from protosteer.settings import setting

RIDGE = 1e-4  # added to covariances by the authors' code


@dataclass(frozen=True)
class SLCASettings(TrainingSettings):
    """Settings of SLCA.

    Defaults are the authors' for Split CIFAR-100 (models/slca.py, exps/slca/slca_cifar.json of their code).
    """

    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 1e-2  # of the head
    backbone_rate: float = setting(1e-2, at_least=0)  # of the backbone, as a share of that
    momentum: float = setting(0.9, at_least=0)
    schedule: str = "step"
    weight_decay: float = 5e-4
    align_epochs: int = setting(5, at_least=0, at_most=100_000)
    align_draws: int = setting(256, at_least=1, at_most=2**16)  # per class and epoch, and per step
    temperature: float = setting(0.1, above=0)  # T


@register_method("slca")
class SLCA(Network):
    """Slow fine-tuning, and a head that is aligned on Gaussians of all classes."""

    source = Source(
        "Zhang et al.",
        "SLCA: slow learner with classifier alignment for continual learning on a pre-trained model",
        "ICCV",
        2023,
    )
    settings_class = SLCASettings
    published = {
        "split-cifar100": {},
        "imagenet-r": {"epochs": 50, "milestone": 0.8},
        "cub200": {"epochs": 50, "milestone": 0.8},
        "cars": {"epochs": 50, "milestone": 0.8, "temperature": 0.05},
    }
    published_source = "exps/slca/*.json of the authors' code (GengDavid/SLCA)"
    grid = {"learning_rate": (1e-2, 3e-3, 3e-2)}
    state_fields = {**Network.state_fields, "trained": "per class", "means": "per class", "factors": "per class"}
    test_settings = {**Network.test_settings, "epochs": 5, "learning_rate": 0.1, "align_epochs": 3, "align_draws": 32}
    settings: SLCASettings

    def __init__(self, backbone: Backbone, settings: SLCASettings):
        super().__init__(backbone, settings)
        self.trained = Head(backbone.dim, backbone.device)  # the head before alignment; `head` is aligned
        self.means = torch.empty(0, backbone.dim)  # of each class, [K, D]
        # Cholesky factors of the covariances, [K, D, D].
        self.factors = torch.empty(0, backbone.dim, backbone.dim)

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Continue with the head before alignment."""
        self.head.assign(*self._rows(self.trained))

    def optimiser(self) -> torch.optim.Optimizer:
        """Create the optimiser, with a smaller rate for all but the head."""
        s, parameters = self.settings, self.parameters()
        head = [p for name, p in parameters.items() if name.startswith("head.")]
        backbone = [p for name, p in parameters.items() if not name.startswith("head.")]
        rate = s.learning_rate
        groups = [{"params": backbone, "lr": rate * s.backbone_rate}, {"params": head, "lr": rate}]
        return torch.optim.SGD(groups, rate, momentum=s.momentum, weight_decay=s.weight_decay)

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy over the task's classes."""
        known_count = len(self.classes)
        return F.cross_entropy(logits[:, known_count:], labels - known_count)

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Store the task's Gaussians and align the head."""
        known_count, (weight, bias) = len(self.trained.bias), self._rows(self.head)
        if known_count:  # no loss trains earlier tasks' rows, but weight decay shrinks them
            weight[:known_count], bias[:known_count] = self._rows(self.trained)
        self.trained.assign(weight, bias)
        embeddings = embed_task(task, self.backbone, self.embed_batch_size, "statistics").double()
        self.add_gaussians(embeddings, labels, RIDGE)
        self.head.assign(*self._rows(self.trained))
        if known_count:
            self.align()

    def add_gaussians(self, embeddings: Tensor, labels: Tensor, ridge: float) -> None:
        """Store the Gaussians of new classes, from embeddings [n, D] in double precision."""
        for number in labels.unique():
            mean, factor = fit_gaussian(embeddings[labels == number], ridge)
            self.means = torch.cat([self.means, mean[None].float()])
            self.factors = torch.cat([self.factors, factor[None].float()])

    @staticmethod
    def _rows(head: Head) -> tuple[Tensor, Tensor]:
        """Copy a head's rows, so that no two heads share parameters."""
        return head.weight.detach().clone(), head.bias.detach().clone()

    def align(self) -> None:
        """Train the head on features drawn from all classes."""
        s, device = self.settings, self.head.weight.device
        self.generator.manual_seed(task_seed(s.seed, self.tasks[-1]))
        labels = torch.arange(len(self.means)).repeat_interleave(s.align_draws)
        optimiser = torch.optim.SGD(
            self.head.parameters(), s.learning_rate, momentum=s.momentum, weight_decay=s.weight_decay
        )
        for epoch in range(s.align_epochs):
            optimiser.param_groups[0]["lr"] = cosine(epoch, s.align_epochs + 1, s.learning_rate, 0.0)
            features = self.draw()
            for rows in torch.randperm(len(labels), generator=self.generator).split(s.align_draws):
                logits = self.alignment_logits(features[rows])
                optimiser.zero_grad()
                F.cross_entropy(logits, labels[rows].to(device)).backward()
                optimiser.step()

    def alignment_logits(self, features: Tensor) -> Tensor:
        """Compute the logits [B, K] of drawn features [B, D] that alignment trains on."""
        return self.normalise(self.head(features))

    def draw(self) -> Tensor:
        """Draw features of every class, one class after the other, [K * draws, D]."""
        task_of = torch.tensor([t for t, task in enumerate(self.tasks) for _ in task])
        scale = 0.9 + 0.1 * (task_of + 1) / len(self.tasks)
        shape = len(self.means), self.settings.align_draws, self.backbone.dim
        noise = torch.randn(shape, generator=self.generator)
        centres = (scale[:, None] * self.means)[:, None]  # [K, 1, D]
        return (centres + noise @ self.factors.mT).flatten(0, 1)

    def normalise(self, logits: Tensor) -> Tensor:
        """Divide logits [B, K] by the mean of their norms within tasks, and by the temperature."""
        norms = [part.norm(dim=1) for part in logits.split([len(task) for task in self.tasks], dim=1)]
        return logits / (torch.stack(norms).mean(dim=0)[:, None] + 1e-7) / self.settings.temperature


def fit_gaussian(rows: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """Return the mean [D] of rows [n, D] and the Cholesky factor [D, D] of their covariance plus a ridge."""
    deviations = rows - rows.mean(dim=0)
    covariance = deviations.T @ deviations / max(1, len(rows) - 1)
    return rows.mean(dim=0), torch.linalg.cholesky(covariance + ridge * torch.eye(rows.shape[1]).to(rows))
