"""Elastic weight consolidation (Kirkpatrick et al.): a penalty on changing weights that matter to earlier tasks.

The importance of a weight w is the diagonal of the Fisher information, measured after each task on its images x,

    F = mean over x of (d log p(y | x) / dw)^2,    y drawn from the network's own p(. | x),

and the loss of a task is L = cross-entropy + lambda / 2 * sum of F (w - w*)^2.

Of the two forms in use, this is the one of constant size: F is the sum over all tasks so far, and w* are the weights
after the latest task. The paper has one anchor for every task; Huszar (2018) derives the single one. The head's rows
for new classes have no F yet and move freely. Labels are drawn among all classes so far, and cross-entropy runs over
all of them too; the paper knows the task at test time. The network, AdamW and its settings are those of `finetune`.

The first task has no penalty, so the grid, which is tried on that task alone, has learning rates and not lambda.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import Chosen, ImageSet
from protosteer.methods.base import Source, TrainingTask, register_method
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import TrainingSettings
from protosteer.settings import setting


@dataclass(frozen=True)
class EWCSettings(TrainingSettings):
    """Settings of EWC."""

    # lambda, our choice: no paper has one for a pre-trained ViT. The paper's 400, for Atari games, is fine-tuning on split
    # digits. Validation accuracy after the last task (`nano`, 5 epochs, batches of 16, `--validation 0.2`): 400 and 1e4
    # 18 and 19 % (seed 0), 1e6 31 % and 1e8 27 % (means of seeds 0, 1, 2), 1e5 and 1e7 27 % (seeds 1, 2).
    penalty: float = setting(1e6, at_least=0)
    # The most images of a task that the Fisher information is measured on. Our choice: the paper has 100 batches.
    fisher_images: int = setting(200, at_least=1)


@register_method("ewc")
class EWC(Network):
    """Fine-tuning with a quadratic penalty."""

    source = Source("Kirkpatrick et al.", "Overcoming catastrophic forgetting in neural networks", "PNAS", 2017)
    settings_class = EWCSettings
    supports_repeated_classes = True
    state_fields = {**Network.state_fields, "fisher": "once"}
    test_settings = {**Network.test_settings, "fisher_images": 4, "penalty": 400.0}
    settings: EWCSettings

    def __init__(self, backbone: Backbone, settings: EWCSettings):
        super().__init__(backbone, settings)
        # The Fisher information by parameter; of the head, for the rows learned so far.
        self.fisher: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}  # the weights at the start of the current task

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Copy the weights as the anchor."""
        self.anchor = {name: p.detach().clone() for name, p in self.parameters().items()}

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Add the penalty to the cross-entropy; see `Network.loss`."""
        loss, embeddings = super().loss(images, labels)
        return loss + 0.5 * self.settings.penalty * self.pull(), embeddings

    def pull(self) -> Tensor:
        """Compute the sum of F (w - w*)^2."""
        total = torch.zeros((), device=self.backbone.device)
        parameters = self.parameters()
        for name, fisher in self.fisher.items():
            shift = parameters[name][: len(fisher)] - self.anchor[name]
            total = total + (fisher * shift**2).sum()
        return total

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Add the task's Fisher information."""
        rows = torch.randperm(len(task.train), generator=self.generator)[: self.settings.fisher_images]
        fisher = self.information(Chosen(task.train, rows.tolist()))
        for name, values in self.fisher.items():
            fisher[name][: len(values)] += values
        self.fisher, self.anchor = fisher, {}

    def information(self, images: ImageSet) -> dict[str, Tensor]:
        """Measure the diagonal of the Fisher information on these images, by parameter.

        One image at a time, because the square of a sum of gradients is not the sum of their squares.
        """
        parameters = self.parameters()
        fisher = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
        for row in range(len(images)):
            pixels = self.backbone.preprocessing(images.pixels([row]), self.backbone.device)
            logits = self.head(self.backbone.embed(pixels))
            probabilities = logits.detach().cpu().softmax(dim=1)
            label = torch.multinomial(probabilities, 1, generator=self.generator)[0].to(logits.device)
            log_p = -F.cross_entropy(logits, label)
            gradients = torch.autograd.grad(log_p, list(parameters.values()), materialize_grads=True)
            for name, gradient in zip(fisher, gradients, strict=True):
                fisher[name] += gradient**2 / len(images)
        return fisher
