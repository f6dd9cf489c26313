"""Elastic weight consolidation (Kirkpatrick et al.): weights that mattered to earlier tasks are held where they are.

How much a weight w matters is the diagonal of the Fisher information, measured after each task on its images x,

    F = mean over x of (d log p(y | x) / dw)^2,    y drawn from the network's own p(. | x),

and while a task is learned, L = cross-entropy + lambda / 2 * sum of F (w - w*)^2 pulls back.

Of the two forms in use this is the one that stays small: F is the sum over all tasks so far, and w* are the weights
after the latest one, in which those before have already been held. The paper has an anchor of its own for every
task; Huszar (2018) derives the single one. Rows of the head for new classes have no F yet and move freely. Labels
are drawn among all classes so far, and cross-entropy runs over these as well: the paper knows the task at test
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import Chosen, ImageSet
from protosteer.methods.base import Source, TaskData
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import Training
from protosteer.settings import setting


@dataclass(frozen=True)
class EWCSettings(Training):
    # Lambda: the paper's "Fisher multiplier", SI Appendix, Table S2 (Atari).
    penalty: float = setting(400.0, at_least=0)
    # Of each task, at most. Our choice: the paper takes 100 batches.
    fisher_images: int = setting(200, at_least=1)


class EWC(Network):
    name = "ewc"
    source = Source(
        "Kirkpatrick et al.", "Overcoming catastrophic forgetting in neural networks", "PNAS", 2017
    )
    settings_class = EWCSettings
    again = True
    settings: EWCSettings

    def __init__(self, backbone: Backbone, settings: EWCSettings):
        super().__init__(backbone, settings)
        self.fisher: dict[str, Tensor] = {}  # by parameter; of the head, the rows that had been learned
        self.anchor: dict[str, Tensor] = {}  # the weights when the task under way began

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        self.anchor = {name: p.detach().clone() for name, p in self.parameters().items()}

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, embeddings = super().loss(images, labels)
        return loss + 0.5 * self.settings.penalty * self.pull(), embeddings

    def pull(self) -> Tensor:
        """The sum of F (w - w*)^2."""
        total = torch.zeros((), device=self.backbone.device)
        own = self.parameters()
        for name, fisher in self.fisher.items():
            moved = own[name][: len(fisher)] - self.anchor[name]
            total = total + (fisher * moved**2).sum()
        return total

    def finish(self, task: TaskData, labels: Tensor) -> None:
        rows = torch.randperm(len(task.train))[: self.settings.fisher_images]
        found = self.information(Chosen(task.train, rows.tolist()))
        for name, earlier in self.fisher.items():
            found[name][: len(earlier)] += earlier
        self.fisher, self.anchor = found, {}

    def information(self, images: ImageSet) -> dict[str, Tensor]:
        """The diagonal of the Fisher information on these images, by parameter.

        One image at a time: the square of a sum of gradients is not the sum of their squares.
        """
        own = self.parameters()
        found = {name: torch.zeros_like(p, requires_grad=False) for name, p in own.items()}
        for row in range(len(images)):
            pixels = self.backbone.preprocessing(images.pixels([row]), self.backbone.device)
            logits = self.head(self.backbone.embed(pixels))
            label = torch.multinomial(logits.detach().cpu().softmax(dim=1), 1)[0].to(logits.device)
            log_p = -F.cross_entropy(logits, label)
            gradients = torch.autograd.grad(log_p, list(own.values()), materialize_grads=True)
            for name, gradient in zip(found, gradients, strict=True):
                found[name] += gradient**2 / len(images)
        return found

    def extras(self) -> dict[str, Tensor]:
        return {f"fisher.{name}": t for name, t in self.fisher.items()}

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        start, device = "fisher.", self.backbone.device
        self.fisher = {n.removeprefix(start): t.to(device) for n, t in tensors.items() if n.startswith(start)}
