"""One task's images in, one prompt out: the paper's Algorithm 1 as one plain loop.

Whoever wants to know how far it is, or to keep it so that another process can go on, listens: see `Callback`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.errors import TrainingError
from protosteer.paper import diagnostics, losses
from protosteer.paper.prompts import Encoder, initial_prompt
from protosteer.paper.prototypes import Anchors
from protosteer.settings import Settings

# For batches of row numbers [N] their images, augmented anew, as tokens that have left the trunk.
Views = Callable[[Sequence[Tensor]], Iterable[Tensor]]


class Callback(Protocol):
    """Hears of a training; it may keep its state and, at the beginning, put one back."""

    def on_train_begin(self, state: TrainingState) -> None: ...
    def on_step_end(self, state: TrainingState) -> None: ...


@dataclass(frozen=True)
class Epoch:
    """What one epoch looked like; `spread` and `accuracy` are of the embeddings of augmented images."""

    loss: float
    accuracy: float
    spread: float


@dataclass(frozen=True)
class Trained:
    prompt: Tensor  # [S, L, D]
    epochs: list[Epoch]
    parameters: int


def train_prompt(
    encoder: Encoder,
    views: Views,
    labels: Tensor,
    settings: Settings,
    start: Tensor | None = None,
    prototypes: Anchors | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Learn the prompt P^t of one task.

    labels: [n], 0..K-1. start: prompt to start from (None: as `settings.prompt_start` says for a first task).
    prototypes: value prototypes of earlier tasks. The caller's random state is left as it was.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        prompt = nn.Parameter(initial_prompt(encoder, settings, start).to(encoder.device))
        head = Head(encoder.dim, int(labels.max()) + 1, settings).to(encoder.device)
        optimiser = torch.optim.AdamW([prompt, *head.parameters()], lr=settings.learning_rate)
        trained = {"prompt": prompt, **{f"head.{name}": p for name, p in head.named_parameters()}}
        state = TrainingState(trained, optimiser, labels, settings.batch_size, settings.epochs)
        if prototypes is not None:
            prototypes = prototypes.to(encoder.device)
        for callback in callbacks:
            callback.on_train_begin(state)

        while state.epoch < settings.epochs:
            batches = state.batches_left()
            for rows, tokens in zip(batches, views(batches), strict=True):
                set_rates(optimiser, state.step, state.steps, settings)
                embeddings = encoder.rest(tokens, settings.prompt_from_layer - 1, prompt)
                loss = head.loss(embeddings, labels[rows].to(encoder.device), prototypes)
                update(loss, [[prompt], list(head.parameters())], optimiser, settings.gradient_clip)
                state.record(loss, embeddings)
                for callback in callbacks:
                    callback.on_step_end(state)
            state.end_epoch()
        return Trained(prompt.detach().cpu(), state.history, sum(p.numel() for p in trained.values()))


def set_rates(optimiser: torch.optim.Optimizer, step: int, steps: int, settings: Settings) -> None:
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(step, steps, settings)
        group["weight_decay"] = weight_decay(step, steps, settings)


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Linear warm-up, then cosine down to the final rate."""
    warm = int(steps * min(settings.warmup_epochs / settings.epochs, settings.warmup_fraction))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return cosine(step - warm, steps - warm, settings.learning_rate, settings.final_learning_rate)


def weight_decay(step: int, steps: int, settings: Settings) -> float:
    return cosine(step, steps, settings.weight_decay, settings.final_weight_decay)


def cosine(step: int, steps: int, start: float, end: float) -> float:
    """`start` at step 0, `end` at the last step."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * step / max(1, steps - 1)))


def update(
    loss: Tensor, groups: Sequence[Sequence[Tensor]], optimiser: torch.optim.Optimizer, clip: float
) -> None:
    """One step downhill; the gradient of each group of parameters is clipped by itself."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    for group in groups:
        nn.utils.clip_grad_norm_(group, clip)
    optimiser.step()


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

    def loss(self, embeddings: Tensor, labels: Tensor, prototypes: Anchors | None) -> Tensor:
        """Loss of a batch: embeddings [N, D] of the prompted backbone, labels [N]."""
        settings, out = self.settings, self.neck(embeddings)
        if self.classifier is not None:
            return losses.cross_entropy(self.classifier(out), labels)
        z = F.normalize(out, dim=1)
        if settings.loss == "supcon":
            return losses.supcon(z, labels, settings.temperature)
        count = len(labels) if settings.prototypes_per_step < 0 else settings.prototypes_per_step
        sampled = sampled_labels = None
        if prototypes is not None and count:
            sampled, sampled_labels = prototypes.sample(count)
            sampled_labels = sampled_labels + labels.max() + 1  # apart from the task's own labels
        rows = settings.anchor_rows == "images+prototypes"
        return losses.cpl(z, labels, settings.temperature, sampled, sampled_labels, settings.uniformity, rows)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


class TrainingState:
    """All that changes while something is trained: what a callback can report, keep and put back.

    Nothing here is about prompts: any loop over epochs of shuffled batches can have one.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimiser: torch.optim.Optimizer,
        labels: Tensor,
        batch_size: int,
        epochs: int,
    ):
        self.parameters = parameters
        self.optimiser = optimiser
        self.labels = labels
        self.batch_size = batch_size
        self.steps_per_epoch = max(1, len(labels) // batch_size)
        self.steps = self.steps_per_epoch * epochs
        self.history: list[Epoch] = []
        self.batches: list[Tensor] = []  # rows of each batch of the current epoch
        self.losses: list[float] = []  # of its finished steps
        self.embeddings: list[Tensor] = []  # [N, D] of its finished steps

    @property
    def epoch(self) -> int:
        """Whole epochs that are done."""
        return len(self.history)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.epoch * self.steps_per_epoch + len(self.losses)

    def batches_left(self) -> list[Tensor]:
        """Of the epoch under way, as row numbers; a new one is shuffled when it begins."""
        self.batches = self.batches or list(epoch_batches(len(self.labels), self.batch_size))
        return self.batches[len(self.losses) :]

    def record(self, loss: Tensor, embeddings: Tensor) -> None:
        """A step is done."""
        self.losses.append(loss.item())
        self.embeddings.append(embeddings.detach().float().cpu())
        if not math.isfinite(self.losses[-1]):
            raise TrainingError(
                f"the loss became {self.losses[-1]} in epoch {self.epoch + 1}, step {len(self.losses)}; lower "
                f"learning_rate (now {self.optimiser.defaults['lr']:g}) or raise temperature",
                code="loss-not-finite",
                epoch=self.epoch + 1,
                step=len(self.losses),
            )

    def end_epoch(self) -> None:
        embeddings, labels = torch.cat(self.embeddings), self.labels[torch.cat(self.batches)]
        _, dense = labels.unique(return_inverse=True)  # a dropped last batch may hold a whole class
        loss = sum(self.losses) / len(self.losses)
        accuracy = diagnostics.own_mean_accuracy(embeddings, dense)
        self.history.append(Epoch(loss, accuracy, diagnostics.spread(embeddings)))
        self.batches, self.losses, self.embeddings = [], [], []


def epoch_batches(count: int, batch_size: int) -> Iterator[Tensor]:
    """Rows of one epoch in random order; a short last batch is dropped, unless it is the only one."""
    order = torch.randperm(count)
    full = order.split(batch_size)
    yield from full[:-1] if len(full) > 1 and len(full[-1]) < batch_size else full
