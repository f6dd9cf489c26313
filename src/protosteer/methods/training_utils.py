"""What methods are made of, beside the room `method/`: labels as numbers, a head that grows, a loop that can be
resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.data.decode_cache import cache_decoded
from protosteer.data.images import ImageSet
from protosteer.errors import LearnerError
from protosteer.methods.base import Answer, TaskData
from protosteer.paper.task import task_seed
from protosteer.paper.trainer import TrainingState, cosine, update
from protosteer.runtime.callbacks import training_callbacks
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage, Stage
from protosteer.settings import AUGMENTATIONS, Values, setting
from protosteer.util.distributed import here

__all__ = [
    "Head",
    "Training",
    "answer_by",
    "class_means",
    "embedded",
    "fit",
    "grown_means",
    "minimise",
    "numbered",
    "task_seed",
]


@dataclass(frozen=True)
class Training(Values):
    """What every method that trains by `fit` can be told; a method's own settings build on it."""

    epochs: int = setting(5, at_least=1, at_most=100_000)
    batch_size: int = setting(64, at_least=2, at_most=2**16)
    learning_rate: float = setting(1e-4, at_least=0)
    schedule: str = setting("constant", choices=("constant", "cosine"))
    weight_decay: float = setting(1e-2, at_least=0)
    gradient_clip: float = setting(5.0, above=0)
    augmentation: str = setting("paper", choices=AUGMENTATIONS)
    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)
    seed: int = setting(0, at_least=0)


def numbered(task: TaskData, known: Sequence[str]) -> tuple[list[str], Tensor]:
    """The task's new classes in alphabetical order, and its labels [n] as numbers: new ones after those known."""
    classes = sorted(set(task.train_labels) - set(known))
    number = {name: i for i, name in enumerate([*known, *classes])}
    return classes, torch.tensor([number[label] for label in task.train_labels])


def embedded(
    task: TaskData,
    backbone: Backbone,
    batch_size: int,
    on_stage: OnStage | None = None,
    doing: str = "keys",
    prompt: Tensor | None = None,
) -> Tensor:
    """[n, D]: the task's training images by the evaluation transform."""

    def on_batch(done: int) -> None:
        if on_stage:
            on_stage(Stage(task.name, doing, done, len(task.train)))

    return backbone.embed_set(task.train, prompt, batch_size, on_batch)


def class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    """[K, D]: the mean embedding of every label there is, in their order."""
    return torch.stack([embeddings[labels == number].mean(dim=0) for number in labels.unique()])


def grown_means(means: Tensor, counts: Tensor, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Means [K, D] of classes of so many images, int64 [K], with more images [n, D] of these classes or new ones."""
    present, more = labels.unique(), labels.bincount(minlength=len(counts))
    new = len(more) - len(counts)
    means, counts = F.pad(means, (0, 0, 0, new)), F.pad(counts, (0, new)) + more
    share = more[present].to(means) / counts[present]
    shift = share[:, None] * (class_means(embeddings, labels) - means[present])
    return means.index_add(0, present, shift), counts


class Head(nn.Module):
    """A linear layer over embeddings that gets rows for new classes; those it has stay as they are."""

    def __init__(self, dim: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dim, device=device))
        self.bias = nn.Parameter(torch.empty(0, device=device))

    def grow(self, new: int) -> None:
        if not new:
            return
        fresh = nn.Linear(self.weight.shape[1], new).to(self.weight.device)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), fresh.weight.detach()]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), fresh.bias.detach()]))

    def put_back(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = (nn.Parameter(t.to(self.weight.device)) for t in (weight, bias))

    def forward(self, embeddings: Tensor) -> Tensor:
        """[B, D] -> logits [B, K]."""
        return F.linear(embeddings.to(self.weight.device), self.weight, self.bias)


def answer_by(logits: Tensor, **more: Tensor) -> Answer:
    """The largest of logits [B, K]; as sure as their softmax is."""
    found = logits.detach().cpu().softmax(dim=1).max(dim=1)
    return Answer(found.indices, confidence=found.values, **more)


def fit(
    name: str,
    images: ImageSet,
    labels: Tensor,
    backbone: Backbone,
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    settings: Training,
    on_stage: OnStage | None = None,
    checkpoint: CheckpointFile | None = None,
    views: int = 1,
) -> None:
    """Train parameters on augmented images of a task; killed at any step, it goes on to the same bits.

    name: of the task. loss: of normalised images [B, 3, H, W] and their labels [B], with the embeddings [B, D]
    behind it. Everything that is random in it must come from torch's generator: seed that beforehand.
    views: so many augmentations of each image, [views * B, 3, H, W]: the whole batch, then the whole batch again.
    """
    from protosteer.data.augment import Augmentation, augmented

    if here().size > 1:
        raise LearnerError(
            "this method can be trained by one process only; run it without torchrun, or its seeds side by side"
        )
    images, device = cache_decoded(images), backbone.device
    augment = Augmentation(backbone.preprocessing, settings.augmentation)
    state = TrainingState(parameters, optimiser, labels, settings.batch_size, settings.epochs)
    rates = [group["lr"] for group in optimiser.param_groups]
    which = {"settings": settings.to_dict(), "classes": labels.unique().tolist(), "images": len(labels)}
    callbacks = training_callbacks(name, which, on_stage, checkpoint)
    for callback in callbacks:
        callback.on_train_begin(state)
    while state.epoch < settings.epochs:
        batches = state.batches_left()
        repeated = [rows.repeat(views) for rows in batches]
        for rows, some in zip(batches, augmented(images, repeated, augment, device), strict=True):
            if settings.schedule == "cosine":
                for group, rate in zip(optimiser.param_groups, rates, strict=True):
                    group["lr"] = cosine(state.step, state.steps, rate, 0.0)
            value, embeddings = loss(some, labels[rows].to(device))
            update(value, [list(parameters.values())], optimiser, settings.gradient_clip)
            state.record(value, embeddings)
            for callback in callbacks:
                callback.on_step_end(state)
        state.end_epoch()


def minimise(loss: Callable[[], Tensor], parameters: Sequence[Tensor], steps: int = 100) -> None:
    """Parameters at the minimum of a convex loss of few numbers: L-BFGS, so that nothing is random."""
    optimiser = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")

    def again() -> float:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    optimiser.step(again)
