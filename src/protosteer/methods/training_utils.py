"""Building blocks of methods: labels as numbers, a head that grows, a training loop that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.backbones.row_sharing import sharing_rows
from protosteer.data.decode_cache import cache_decoded
from protosteer.data.images import ImageSet
from protosteer.methods.base import Answer, MethodSettings, TrainingTask
from protosteer.paper.diagnostics import accuracy_and_spread
from protosteer.paper.task import task_seed
from protosteer.paper.trainer import cosine, update
from protosteer.runtime.callbacks import training_callbacks
from protosteer.runtime.progress import counting
from protosteer.settings import AUGMENTATIONS, setting
from protosteer.util.distributed import process_group
from protosteer.util.seeded import seeded
from protosteer.util.training_state import Stateful, TrainingState

__all__ = [
    "Head", "TrainingJob", "TrainingSettings", "answer_by", "class_means", "embed_task", "fit", "minimise",
    "number_labels", "scheduled_rate", "task_cross_entropy", "task_seed", "update_means",
]  # fmt: skip


@dataclass(frozen=True)
class TrainingSettings(MethodSettings):
    """Settings of every method that trains by `fit`; a method's own settings inherit from them."""

    epochs: int = setting(5, at_least=1, at_most=100_000)
    batch_size: int = setting(64, at_least=2, at_most=2**16)
    learning_rate: float = setting(1e-4, at_least=0)
    schedule: str = setting("constant", choices=("constant", "cosine", "step"))
    milestone: float = setting(0.9, at_least=0, at_most=1)  # share of the steps after which "step" falls to a tenth
    weight_decay: float = setting(1e-2, at_least=0)
    gradient_clip: float = setting(5.0, above=0)
    augmentation: str = setting("paper", choices=AUGMENTATIONS)


def number_labels(task: TrainingTask, known_names: Sequence[str]) -> tuple[list[str], Tensor]:
    """Number a task's labels; new classes follow the known ones, in alphabetical order.

    Args:
        task: The task.
        known_names: The names of the classes learned before.

    Returns:
        The names of the new classes, and the labels as numbers, int64 [n].
    """
    classes = sorted(set(task.train_labels) - set(known_names))
    number = {name: i for i, name in enumerate([*known_names, *classes])}
    return classes, torch.tensor([number[label] for label in task.train_labels])


def embed_task(
    task: TrainingTask, backbone: Backbone, batch_size: int, stage: str = "keys", prompt: Prompt | None = None
) -> Tensor:
    """Embed a task's training images with the evaluation transform.

    Args:
        task: The task, with n images.
        backbone: The backbone.
        batch_size: Images per forward pass.
        stage: What to call this in progress reports.
        prompt: A prompt [S, L, D] for all images, or another kind that `Backbone.embed` accepts.

    Returns:
        Embeddings [n, D].
    """
    on_batch = counting(task.on_stage, task.name, stage, len(task.train))
    return backbone.embed_set(task.train, prompt, batch_size, on_batch)


def class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of embeddings [n, D] for every label that occurs, in order, [K, D]."""
    return torch.stack([embeddings[labels == number].mean(dim=0) for number in labels.unique()])


def update_means(means: Tensor, counts: Tensor, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Update class means with more images of these classes or of new ones.

    Args:
        means: [K, D].
        counts: The number of images behind each mean, int64 [K].
        embeddings: Of the new images, [n, D].
        labels: Their class numbers, int64 [n].

    Returns:
        The new means and counts.
    """
    class_numbers, new_counts = labels.unique(), labels.bincount(minlength=len(counts))
    class_growth = len(new_counts) - len(counts)
    means, counts = F.pad(means, (0, 0, 0, class_growth)), F.pad(counts, (0, class_growth)) + new_counts
    share = new_counts[class_numbers].to(means) / counts[class_numbers]
    shift = share[:, None] * (class_means(embeddings, labels) - means[class_numbers])
    return means.index_add(0, class_numbers, shift), counts


class Head(nn.Module):
    """A linear layer over embeddings that grows with new classes; existing rows stay as they are."""

    def __init__(self, dim: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dim, device=device))
        self.bias = nn.Parameter(torch.empty(0, device=device))

    def grow(self, count: int, generator: torch.Generator | None = None) -> None:
        """Add freshly initialised rows for this many new classes, drawn by a generator or torch's own."""
        if not count:
            return
        layer = seeded(lambda: nn.Linear(self.weight.shape[1], count), generator).to(self.weight.device)
        self.assign(
            torch.cat([self.weight.detach(), layer.weight.detach()]),
            torch.cat([self.bias.detach(), layer.bias.detach()]),
        )

    def assign(self, weight: Tensor, bias: Tensor) -> None:
        """Replace all rows by weight [K, D] and bias [K]."""
        self.weight, self.bias = (nn.Parameter(t.to(self.weight.device)) for t in (weight, bias))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load rows, whatever their number."""
        self.assign(state_dict["weight"], state_dict["bias"])

    def forward(self, embeddings: Tensor) -> Tensor:
        """Compute logits [B, K] of embeddings [B, D]."""
        return F.linear(embeddings.to(self.weight.device), self.weight, self.bias)


def task_cross_entropy(logits: Tensor, labels: Tensor, known_count: int) -> Tensor:
    """Compute the cross-entropy over a task's own classes, those of logits [B, K] after the first `known_count`.

    A task of one class would learn nothing this way, so there, all classes count.
    """
    start = known_count if logits.shape[1] > known_count + 1 else 0
    return F.cross_entropy(logits[:, start:], labels - start)


def answer_by(logits: Tensor, **fields: Tensor) -> Answer:
    """Predict the class of the largest of logits [B, K], with its softmax as confidence."""
    probabilities = logits.detach().cpu().softmax(dim=1)
    top = probabilities.max(dim=1)
    return Answer(top.indices, confidence=top.values, scores=probabilities, **fields)


@dataclass(frozen=True)
class TrainingJob:
    """What `fit` trains, on what, and how.

    Attributes:
        task: The task: its name, progress and checkpoint.
        images: The images to train on; the task's own, or others too.
        labels: Their class numbers, int64 [n].
        backbone: Its preprocessing and device are used.
        parameters: The parameters to train, by name.
        optimiser: Their optimiser.
        loss: Maps normalised images [B, 3, H, W] and labels [B] to a loss and the embeddings [B, D] behind it.
            All its randomness must come from `generator`.
        settings: Epochs, batch size, schedule and so on.
        generator: Draws batches and augmentations; seed it before. A resumed training continues its numbers.
        views: Augmentations of each image. The loss gets [views * B, 3, H, W]: the batch, then the batch again.
        on_step: Called after each step with the rows of its batch.
        companion: What `on_step` changes; a checkpoint saves and restores it.
    """

    task: TrainingTask
    images: ImageSet
    labels: Tensor
    backbone: Backbone
    parameters: Mapping[str, nn.Parameter]
    optimiser: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    settings: TrainingSettings
    generator: torch.Generator
    views: int = 1
    on_step: Callable[[Tensor], None] | None = None
    companion: Stateful | None = None


def fit(job: TrainingJob) -> None:
    """Train parameters on augmented images; an interrupted training resumes bit-identically.

    Under torchrun, every rank augments the whole batch, and embeds its own rows: see `backbones.row_sharing`.
    """
    from protosteer.data.augment import Augmentation, augmented

    s, labels, optimiser, device = job.settings, job.labels, job.optimiser, job.backbone.device
    images, augment = cache_decoded(job.images), Augmentation(job.backbone.preprocessing, s.augmentation)
    state = TrainingState(job.parameters, optimiser, labels, s.batch_size, s.epochs, job.generator, job.companion)
    rates = [group["lr"] for group in optimiser.param_groups]
    run_key = {"settings": s.to_dict(), "classes": labels.unique().tolist(), "images": len(labels)}
    callbacks = training_callbacks(job.task.name, run_key, job.task.on_stage, job.task.checkpoint)
    for callback in callbacks:
        callback.on_train_begin(state)
    while state.epoch < s.epochs:
        batches = state.remaining_batches()
        view_rows = [rows.repeat(job.views) for rows in batches]
        pictures = augmented(images, view_rows, augment, device, generator=job.generator)
        for rows, views in zip(batches, pictures, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = scheduled_rate(s, state.step, state.steps, rate)
            with sharing_rows(process_group()):
                loss, embeddings = job.loss(views, labels[rows].to(device))
            update(loss, [list(job.parameters.values())], optimiser, s.gradient_clip)
            state.end_step(loss, embeddings)
            if job.on_step:
                job.on_step(rows)
            for callback in callbacks:
                callback.on_step_end(state)
        state.end_epoch(accuracy_and_spread)


def scheduled_rate(settings: TrainingSettings, step: int, steps: int, rate: float) -> float:
    """Return the learning rate of a step, given that of the first."""
    if settings.schedule == "cosine":
        return cosine(step, steps, rate, 0.0)
    return rate / 10 if settings.schedule == "step" and step >= settings.milestone * steps else rate


def minimise(loss: Callable[[], Tensor], parameters: Sequence[Tensor], max_iter: int = 100, **options: Any) -> None:
    """Minimise a convex loss of few parameters in place, by torch's L-BFGS and its options, so that nothing is random."""
    optimiser = torch.optim.LBFGS(parameters, max_iter=max_iter, line_search_fn="strong_wolfe", **options)

    def closure() -> float:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    optimiser.step(closure)
