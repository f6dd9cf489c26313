"""One task's images in, one prompt out: the paper's Algorithm 1 as one plain loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer import health, losses
from protosteer.anchors import Anchors
from protosteer.backbones import Backbone
from protosteer.data.augment import Augmentation
from protosteer.data.images import ImageSet
from protosteer.errors import TrainingError
from protosteer.settings import Settings


@dataclass(frozen=True)
class Progress:
    """Where training stands. Loss and accuracy are means over the epoch named."""

    epoch: int
    epochs: int
    step: int  # counted over the whole task
    steps: int
    loss: float
    accuracy: float | None  # percent of the last whole epoch's images nearest to their own class mean
    images_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Epoch:
    """What one epoch looked like; `spread` and `accuracy` are of the prompted, augmented embeddings."""

    loss: float
    accuracy: float
    spread: float


@dataclass(frozen=True)
class Trained:
    prompt: Tensor
    epochs: list[Epoch]
    seconds: float
    parameters: int


def train_prompt(
    backbone: Backbone,
    images: ImageSet,
    labels: Tensor,
    settings: Settings,
    start: Tensor | None = None,
    anchors: Anchors | None = None,
    seed: int = 0,
    on_step: Callable[[Progress], None] | None = None,
) -> Trained:
    """Learn the prompt P^t of one task.

    labels: [n], 0..K-1. start: prompt to start from (None: as `settings.prompt_start` says for a first
    task). anchors: value prototypes of earlier tasks. The caller's random state is left as it was.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _train(backbone, images, labels, settings, start, anchors, on_step)


def _train(
    backbone: Backbone,
    images: ImageSet,
    labels: Tensor,
    settings: Settings,
    start: Tensor | None,
    anchors: Anchors | None,
    on_step: Callable[[Progress], None] | None,
) -> Trained:
    device = backbone.device
    prompt = nn.Parameter(initial_prompt(backbone, settings, start).to(device))
    head = Head(backbone.dim, int(labels.max()) + 1, settings).to(device)
    augment = Augmentation(backbone.preprocessing, settings.augmentation)
    anchors = None if anchors is None else anchors.to(device)
    optimiser = torch.optim.AdamW([prompt, *head.parameters()], lr=settings.learning_rate)

    steps_per_epoch = max(1, len(labels) // settings.batch_size)
    steps = steps_per_epoch * settings.epochs
    history: list[Epoch] = []
    began = time.perf_counter()
    for epoch in range(settings.epochs):
        step_losses: list[float] = []
        seen: list[Tensor] = []
        order = list(batches(len(labels), settings.batch_size))
        for rows in order:
            step = epoch * steps_per_epoch + len(step_losses)
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps, settings)
                group["weight_decay"] = weight_decay(step, steps, settings)
            pixels = images.pixels(rows.tolist()).to(device, non_blocking=True)
            embeddings = backbone.embed(augment(pixels), prompt)
            loss = head.loss(embeddings, labels[rows].to(device), anchors)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            for parameters in ([prompt], head.parameters()):
                nn.utils.clip_grad_norm_(parameters, settings.gradient_clip)
            optimiser.step()

            step_losses.append(loss.item())
            seen.append(embeddings.detach().float().cpu())
            if not math.isfinite(step_losses[-1]):
                raise TrainingError(
                    f"the loss became {step_losses[-1]} in epoch {epoch + 1}, step {len(step_losses)}; lower "
                    f"learning_rate (now {settings.learning_rate:g}) or raise temperature"
                )
            if on_step:
                rate = (step + 1) / (time.perf_counter() - began)
                accuracy = history[-1].accuracy if history else None
                mean_loss = sum(step_losses) / len(step_losses)
                on_step(
                    Progress(
                        epoch + 1, settings.epochs, step + 1, steps, mean_loss, accuracy,
                        rate * len(rows), (steps - step - 1) / rate,
                    )
                )  # fmt: skip
        history.append(_epoch(step_losses, torch.cat(seen), labels[torch.cat(order)]))
    seconds = time.perf_counter() - began
    trained = sum(p.numel() for p in (prompt, *head.parameters()))
    return Trained(prompt.detach().cpu(), history, seconds, trained)


class Head(nn.Module):
    """The neck m_sigma and the loss behind it: new for every task, thrown away after it."""

    def __init__(self, dim: int, classes: int, settings: Settings):
        super().__init__()
        self.settings = settings
        widths = [dim] + [settings.neck_hidden] * (settings.neck_layers - 1) + [dim]
        layers: list[nn.Module] = []
        for inputs, outputs in zip(widths, widths[1:], strict=False):
            layers += [_linear(inputs, outputs), nn.GELU()]
        self.neck = nn.Sequential(*layers[:-1])
        self.classifier = _linear(dim, classes) if settings.loss == "cross-entropy" else None

    def loss(self, embeddings: Tensor, labels: Tensor, anchors: Anchors | None) -> Tensor:
        """Loss of a batch: embeddings [N, D] of the prompted backbone, labels [N]."""
        settings, out = self.settings, self.neck(embeddings)
        if self.classifier is not None:
            return losses.cross_entropy(self.classifier(out), labels)
        z = F.normalize(out, dim=1)
        if settings.loss == "supcon":
            return losses.supcon(z, labels, settings.temperature)
        count = len(labels) if settings.prototypes_per_step < 0 else settings.prototypes_per_step
        prototypes = prototype_labels = None
        if anchors is not None and count:
            prototypes, prototype_labels = anchors.sample(count)
            prototype_labels = prototype_labels + labels.max() + 1  # apart from the task's own labels
        rows = settings.anchor_rows == "images+prototypes"
        return losses.cpl(
            z, labels, settings.temperature, prototypes, prototype_labels, settings.uniformity, rows
        )


def initial_prompt(backbone: Backbone, settings: Settings, start: Tensor | None) -> Tensor:
    """[S, L, D]: the previous task's prompt, zero, or small random numbers."""
    shape = backbone.prompt_shape(settings.prompt_length, settings.prompt_kind == "deep")
    if settings.prompt_start == "random":
        return nn.init.trunc_normal_(torch.empty(shape), std=0.02)
    if start is None or settings.prompt_start == "zero":
        return torch.zeros(shape)
    return start.detach().clone()


def batches(count: int, batch_size: int) -> Iterator[Tensor]:
    """Rows of one epoch in random order; a short last batch is dropped, unless it is the only one."""
    order = torch.randperm(count)
    full = order.split(batch_size)
    yield from full[:-1] if len(full) > 1 and len(full[-1]) < batch_size else full


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Linear warm-up, then cosine down to the final rate."""
    warm = int(steps * min(settings.warmup_epochs / settings.epochs, settings.warmup_fraction))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return _cosine(step - warm, steps - warm, settings.learning_rate, settings.final_learning_rate)


def weight_decay(step: int, steps: int, settings: Settings) -> float:
    return _cosine(step, steps, settings.weight_decay, settings.final_weight_decay)


def _cosine(step: int, steps: int, start: float, end: float) -> float:
    """`start` at step 0, `end` at the last step."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * step / max(1, steps - 1)))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


def _epoch(step_losses: list[float], embeddings: Tensor, labels: Tensor) -> Epoch:
    _, dense = labels.unique(return_inverse=True)  # a dropped last batch may hold a whole class
    return Epoch(
        loss=sum(step_losses) / len(step_losses),
        accuracy=health.own_mean_accuracy(embeddings, dense),
        spread=health.spread(embeddings),
    )
