"""What is trained on one task alone, under a head of its classes: prompts and the like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.base import TaskData
from protosteer.methods.training_utils import Training, fit, numbered, task_seed
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import setting

MOMENTUM = 0.9


@dataclass(frozen=True)
class PromptTraining(Training):
    """How a prompt is trained; the defaults are those of `adapted_prompt`.

    They are LAMDA-PILOT's, the toolbox of APER's authors (exps/aper_vpt_deep.json). `gradient_clip` and
    `augmentation` are ours: there, gradients are not clipped.
    """

    epochs: int = 20
    batch_size: int = 48
    learning_rate: float = 0.01
    schedule: str = "cosine"
    weight_decay: float = 5e-4
    prompt_length: int = setting(5, at_least=1, at_most=4096)


class CosineHead(nn.Module):
    """Cosine similarities to one row per class, times a scale that is trained and begins at 1."""

    def __init__(self, dim: int, classes: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(dim, classes, bias=False).weight.detach().to(device))
        self.scale = nn.Parameter(torch.ones((), device=device))

    def forward(self, embeddings: Tensor) -> Tensor:
        """[B, D] -> logits [B, K]."""
        return self.scale * F.linear(F.normalize(embeddings, dim=1), F.normalize(self.weight, dim=1))


def train_alone(
    task: TaskData,
    backbone: Backbone,
    parameters: Mapping[str, nn.Parameter],
    embed: Callable[[Tensor], Tensor],
    head: nn.Module,
    settings: Training,
    on_stage: OnStage | None = None,
    checkpoint: CheckpointFile | None = None,
    penalty: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Train `parameters` and a head by cross-entropy over the task's own classes, in alphabetical order.

    embed: normalised images [B, 3, H, W] -> [B, D], through the parameters. penalty: of logits [B, K], added
    to the loss. Seed torch beforehand.
    """
    trained = dict([*parameters.items(), *head.named_parameters("head")])
    rate, decay = settings.learning_rate, settings.weight_decay
    optimiser = torch.optim.SGD(trained.values(), rate, MOMENTUM, weight_decay=decay)

    def loss(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = embed(images)
        logits = head(embeddings)
        value = F.cross_entropy(logits, labels)
        return value if penalty is None else value + penalty(logits), embeddings

    labels = numbered(task, [])[1]
    fit(task.name, task.train, labels, backbone, trained, optimiser, loss, settings, on_stage, checkpoint)


def train_prompt(
    task: TaskData,
    backbone: Backbone,
    start: Tensor,
    head: nn.Module,
    settings: Training,
    on_stage: OnStage | None = None,
    checkpoint: CheckpointFile | None = None,
) -> Tensor:
    """[S, L, D]: a prompt trained from `start` with a head, as `train_alone` says."""
    prompt = nn.Parameter(start.to(backbone.device, copy=True))

    def embed(images: Tensor) -> Tensor:
        return backbone.embed(images, prompt)

    train_alone(task, backbone, {"prompt": prompt}, embed, head, settings, on_stage, checkpoint)
    return prompt.detach().cpu()


def adapted_prompt(
    task: TaskData,
    backbone: Backbone,
    settings: PromptTraining,
    on_stage: OnStage | None = None,
    checkpoint: CheckpointFile | None = None,
) -> Tensor:
    """[depth, L, D]: a deep prompt that fits a frozen backbone to one task, begun at zero.

    The head that it is trained under is thrown away. The caller's random state is left as it was.
    """
    classes = numbered(task, [])[0]
    with torch.random.fork_rng():
        torch.manual_seed(task_seed(settings.seed, classes))
        head = CosineHead(backbone.dim, len(classes), backbone.device)
        start = torch.zeros(backbone.prompt_shape(settings.prompt_length))
        return train_prompt(task, backbone, start, head, settings, on_stage, checkpoint)
