"""Joint linear probe: logistic regression on the frozen embeddings of all images of all tasks.

No linear head on these features is learned from more: what a method that keeps less than every embedding
misses is what keeping less costs. After each task, weights W [K, D] and biases b are solved for anew, from
zero, by L-BFGS in double precision:

    mean over images of cross-entropy(W z + b, y) + penalty / 2 * |W|^2,    z = (f - mean) / deviation

Embeddings f are standardised by what is kept, since backbones differ in the scale of their features, and what
the penalty means with it. It is scikit-learn's LogisticRegression with C = 1 / (penalty * images). Where there
is a published method (linear probes, Alain and Bengio, 2016), there is no published penalty: ours is a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Source, TaskData
from protosteer.methods.feature_bank import KeepsEmbeddings
from protosteer.methods.training_utils import answer_by
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import Values, setting

MOST_ITERATIONS = 1000
GRADIENT = 1e-8  # solved when no entry of the gradient is larger


@dataclass(frozen=True)
class ProbeSettings(Values):
    penalty: float = setting(1e-2, above=0)  # our choice
    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)
    seed: int = setting(0, at_least=0)


class Probe(KeepsEmbeddings):
    name = "probe"
    source = Source(
        "Alain and Bengio", "Understanding intermediate layers using linear classifier probes", "arXiv", 2016
    )
    trains = "a linear head, on all tasks"
    settings_class = ProbeSettings

    def __init__(self, backbone: Backbone, settings: ProbeSettings):
        super().__init__(backbone, settings)
        self.weight = torch.empty(0, backbone.dim)  # [K, D], for embeddings as they are
        self.bias = torch.empty(0)  # [K]

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        super().learn(task, on_stage, checkpoint)
        embeddings = self.embeddings.double()
        mean, deviation = embeddings.mean(dim=0), embeddings.std(dim=0, correction=0)
        deviation[deviation == 0] = 1  # a feature that never changes tells nothing, and harms nothing
        weight, bias = regression((embeddings - mean) / deviation, self.labels, self.settings.penalty)
        weight = weight / deviation
        self.weight, self.bias = weight.float(), (bias - weight @ mean).float()

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        return answer_by(F.linear(images.embed(torch.arange(len(images))), self.weight, self.bias))

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "weight": self.weight, "bias": self.bias}

    def bytes_per_task(self) -> list[int]:
        head = 4 * (self.backbone.dim + 1)
        kept = super().bytes_per_task()
        return [own + head * len(task) for own, task in zip(kept, self.tasks, strict=True)]

    def trained_parameters(self) -> int:
        return self.weight.numel() + self.bias.numel()


def regression(rows: Tensor, labels: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """W [K, D] and b [K] of the least penalised cross-entropy of rows [N, D], in their precision."""
    classes = int(labels.max()) + 1
    weight, bias = rows.new_zeros(classes, rows.shape[1]), rows.new_zeros(classes)
    solver = torch.optim.LBFGS(
        [weight.requires_grad_(), bias.requires_grad_()],
        max_iter=MOST_ITERATIONS,
        max_eval=2 * MOST_ITERATIONS,
        tolerance_grad=GRADIENT,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        solver.zero_grad()
        value = F.cross_entropy(F.linear(rows, weight, bias), labels) + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    solver.step(loss)
    return weight.detach(), bias.detach()
