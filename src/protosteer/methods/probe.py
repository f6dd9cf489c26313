"""Joint linear probe: logistic regression on the frozen embeddings of all images of all tasks.

This is the upper bound of linear heads on these features: the difference to it is what a method pays for storing less
than every embedding. After each task, weights W [K, D] and biases b are solved from zero, by L-BFGS in double
precision:

    mean over images of cross-entropy(W z + b, y) + penalty / 2 * |W|^2,    z = (f - mean) / deviation

Embeddings f are standardised, because backbones differ in the scale of their features, and the penalty depends on it.
This is scikit-learn's LogisticRegression with C = 1 / (penalty * images). The method is published (linear probes, Alain
and Bengio, 2016), but no penalty is; ours is a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, MethodSettings, Source, TrainingTask, register_method
from protosteer.methods.feature_bank import FeatureBank
from protosteer.methods.training_utils import answer_by, minimise
from protosteer.settings import setting

MAX_ITERATIONS = 1000
MAX_GRADIENT = 1e-8  # solved when no entry of the gradient is larger


@dataclass(frozen=True)
class ProbeSettings(MethodSettings):
    """Settings of the probe."""

    penalty: float = setting(1e-2, above=0)  # without one, separable classes have no solution


@register_method("probe")
class Probe(FeatureBank):
    """Logistic regression on all embeddings."""

    source = Source(
        "Alain and Bengio", "Understanding intermediate layers using linear classifier probes", "arXiv", 2016
    )
    trains = "a linear head, on all tasks"
    settings_class = ProbeSettings
    grid = {"penalty": (1e-2, 1e-3, 1e-1)}
    state_fields = {**FeatureBank.state_fields, "weight": "per class", "bias": "per class"}

    def __init__(self, backbone: Backbone, settings: ProbeSettings):
        super().__init__(backbone, settings)
        self.weight = torch.empty(0, backbone.dim)  # for plain embeddings, [K, D]
        self.bias = torch.empty(0)  # [K]

    def learn(self, task: TrainingTask) -> None:
        """Store the task's embeddings and solve the regression again."""
        super().learn(task)
        embeddings = self.embeddings.double()
        mean, deviation = embeddings.mean(dim=0), embeddings.std(dim=0, correction=0)
        deviation[deviation == 0] = 1  # a constant feature has no effect
        weight, bias = fit_regression((embeddings - mean) / deviation, self.labels, self.settings.penalty)
        weight = weight / deviation
        self.weight, self.bias = weight.float(), (bias - weight @ mean).float()

    def answer(self, images: Images) -> Answer:
        """Predict the class of the largest logit."""
        return answer_by(F.linear(images.embed(torch.arange(len(images))), self.weight, self.bias))

    def trained_parameters(self) -> int:
        """Return the size of the head."""
        return self.weight.numel() + self.bias.numel()


def fit_regression(rows: Tensor, labels: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Solve the penalised logistic regression of rows [N, D], in their precision; returns W [K, D] and b [K]."""
    classes = int(labels.max()) + 1
    weight = rows.new_zeros(classes, rows.shape[1], requires_grad=True)
    bias = rows.new_zeros(classes, requires_grad=True)

    def loss() -> Tensor:
        return F.cross_entropy(F.linear(rows, weight, bias), labels) + penalty / 2 * weight.square().sum()

    limits = {"max_eval": 2 * MAX_ITERATIONS, "tolerance_grad": MAX_GRADIENT, "tolerance_change": 0}
    minimise(loss, [weight, bias], MAX_ITERATIONS, **limits)
    return weight.detach(), bias.detach()
