"""Train prompts and other parameters on one task alone, under a head of its classes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.errors import ProtosteerWarning
from protosteer.methods.adapters import new_adapters, with_adapters
from protosteer.methods.base import TrainingTask
from protosteer.methods.training_utils import TrainingJob, TrainingSettings, fit, number_labels, task_seed
from protosteer.settings import setting
from protosteer.util.seeded import seeded

MOMENTUM = 0.9
MIN_CHANGE = 1e-5  # 1 - cosine of plain and trained features, below which a warning says so
MAX_PROBES = 64  # images on which the change is measured


@dataclass(frozen=True)
class PromptTraining(TrainingSettings):
    """How a prompt is trained.

    Defaults are LAMDA-PILOT's, the toolbox of APER's authors (exps/aper_vpt_deep.json). `gradient_clip` and
    `augmentation` are ours: there, gradients are not clipped.
    """

    epochs: int = 20
    batch_size: int = 48
    learning_rate: float = 0.01
    schedule: str = "cosine"
    weight_decay: float = 5e-4
    prompt_length: int = setting(5, at_least=1, at_most=4096)


class CosineHead(nn.Module):
    """Cosine similarities to one row per class, times a trained scale that starts at 1."""

    def __init__(self, dim: int, classes: int, device: torch.device, generator: torch.Generator | None = None):
        super().__init__()
        rows = seeded(lambda: nn.Linear(dim, classes, bias=False), generator).weight
        self.weight = nn.Parameter(rows.detach().to(device))
        self.scale = nn.Parameter(torch.ones((), device=device))

    def forward(self, embeddings: Tensor) -> Tensor:
        """Compute logits [B, K] of embeddings [B, D]."""
        return self.scale * F.linear(F.normalize(embeddings, dim=1), F.normalize(self.weight, dim=1))


def tune(
    task: TrainingTask,
    backbone: Backbone,
    parameters: Mapping[str, nn.Parameter],
    embed: Callable[[Tensor], Tensor],
    head: nn.Module,
    settings: TrainingSettings,
    generator: torch.Generator,
    penalty: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Train parameters and a head by cross-entropy over the task's classes, in alphabetical order.

    Args:
        task: The task.
        backbone: The backbone.
        parameters: The parameters to train, by name.
        embed: Maps normalised images [B, 3, H, W] to embeddings [B, D], through the parameters.
        head: Maps embeddings to logits [B, K].
        settings: How to train.
        generator: Draws batches and augmentations.
        penalty: Maps logits [B, K] to a value that is added to the loss.
    """
    trainable = dict([*parameters.items(), *head.named_parameters("head")])
    rate, decay = settings.learning_rate, settings.weight_decay
    optimiser = torch.optim.SGD(trainable.values(), rate, MOMENTUM, weight_decay=decay)

    def loss(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = embed(images)
        logits = head(embeddings)
        value = F.cross_entropy(logits, labels)
        return value if penalty is None else value + penalty(logits), embeddings

    labels = number_labels(task, [])[1]
    fit(TrainingJob(task, task.train, labels, backbone, trainable, optimiser, loss, settings, generator))


def tune_prompt(
    task: TrainingTask,
    backbone: Backbone,
    start: Tensor,
    head: nn.Module,
    settings: TrainingSettings,
    generator: torch.Generator,
) -> Tensor:
    """Train a prompt [S, L, D] from `start` with a head, as `tune` does, and return it."""
    prompt = nn.Parameter(start.to(backbone.device, copy=True))
    tune(task, backbone, {"prompt": prompt}, lambda images: backbone.embed(images, prompt), head, settings, generator)
    return prompt.detach().cpu()


def tune_deep_prompt(task: TrainingTask, backbone: Backbone, settings: PromptTraining) -> Tensor:
    """Train a deep prompt [depth, L, D] on one task, from zero, under a head that is discarded."""
    classes = number_labels(task, [])[0]
    generator = torch.Generator().manual_seed(task_seed(settings.seed, classes))
    head = CosineHead(backbone.dim, len(classes), backbone.device, generator)
    start = torch.zeros(backbone.prompt_shape(settings.prompt_length))
    prompt = tune_prompt(task, backbone, start, head, settings, generator)
    warn_if_unchanged(task, backbone, backbone, prompt)
    return prompt


def tune_adapters(
    task: TrainingTask, backbone: Backbone, settings: TrainingSettings, width: int, scale: float
) -> nn.ModuleList:
    """Train new adapters, one per layer, on one task, under a head that is discarded."""
    classes = number_labels(task, [])[0]
    generator = torch.Generator().manual_seed(task_seed(settings.seed, classes))
    adapters = new_adapters(backbone, width, generator)
    head = CosineHead(backbone.dim, len(classes), backbone.device, generator)
    adapted_backbone = with_adapters(backbone, adapters, scale, trainable=True)
    tune(task, adapted_backbone, dict(adapters.named_parameters()), adapted_backbone.embed, head, settings, generator)
    warn_if_unchanged(task, backbone, adapted_backbone, None)
    return adapters


def warn_if_unchanged(task: TrainingTask, backbone: Backbone, adaptation: Backbone, prompt: Tensor | None) -> None:
    """Warn if training has hardly changed the features: the method then predicts from those of the plain backbone."""
    if len(set(task.train_labels)) == 1:
        return  # cross-entropy over one class is 0
    rows = list(range(min(MAX_PROBES, len(task.train))))
    plain_features = backbone.embed_set(task.train, rows=rows)
    features = adaptation.embed_set(task.train, prompt, rows=rows)
    cosine = float(F.cosine_similarity(plain_features.double(), features.double()).mean())
    if 1 - cosine < MIN_CHANGE:
        message = (
            f"task {task.name!r}: training hardly changed the features (mean cosine to the plain ones {cosine:.6f}); "
            "raise learning_rate or epochs"
        )
        warnings.warn(message, ProtosteerWarning, stacklevel=2)
