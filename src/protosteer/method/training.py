"""One task's images in, one prompt out: the paper's Algorithm 1 as one plain loop."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.data.augment import Augmentation
from protosteer.data.images import ImageSet
from protosteer.data.prefetch import prefetched
from protosteer.errors import TrainingError
from protosteer.method import health, losses
from protosteer.method.anchors import Anchors
from protosteer.running.progress import Progress
from protosteer.running.resume import Bookmark
from protosteer.settings import Settings


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
    bookmark: Bookmark | None = None,
) -> Trained:
    """Learn the prompt P^t of one task.

    labels: [n], 0..K-1. start: prompt to start from (None: as `settings.prompt_start` says for a first
    task). anchors: value prototypes of earlier tasks. bookmark: where to keep the training while it is under
    way, and to look whether it had begun. The caller's random state is left as it was.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _train(backbone, images, labels, settings, start, anchors, seed, on_step, bookmark)


def _train(
    backbone: Backbone,
    images: ImageSet,
    labels: Tensor,
    settings: Settings,
    start: Tensor | None,
    anchors: Anchors | None,
    seed: int,
    on_step: Callable[[Progress], None] | None,
    bookmark: Bookmark | None,
) -> Trained:
    began = time.perf_counter()
    device = backbone.device
    prompt = nn.Parameter(initial_prompt(backbone, settings, start).to(device))
    head = Head(backbone.dim, int(labels.max()) + 1, settings).to(device)
    anchors = None if anchors is None else anchors.to(device)
    optimiser = torch.optim.AdamW([prompt, *head.parameters()], lr=settings.learning_rate)
    state = State(prompt, head, optimiser)
    layers = settings.prompt_from_layer - 1
    augment = Augmentation(backbone.preprocessing, settings.augmentation)
    which = {**settings.to_dict(), "seed": seed, "images": len(labels), "backbone": backbone.fingerprint}
    if bookmark:
        state.restore(bookmark, which)

    steps_per_epoch = max(1, len(labels) // settings.batch_size)
    steps = steps_per_epoch * settings.epochs
    first = state.steps_done(steps_per_epoch)
    earlier, first_step = state.seconds, time.perf_counter()
    while len(state.history) < settings.epochs:
        epoch = len(state.history)
        state.order = state.order or list(batches(len(labels), settings.batch_size))
        remaining = state.order[len(state.losses) :]
        for rows, pixels in zip(remaining, prefetched(images, remaining, device=device), strict=True):
            step = state.steps_done(steps_per_epoch)
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps, settings)
                group["weight_decay"] = weight_decay(step, steps, settings)
            tokens = backbone.trunk(augment(pixels.to(device, non_blocking=True)), layers)
            embeddings = backbone.rest(tokens, layers, prompt)
            loss = head.loss(embeddings, labels[rows].to(device), anchors)
            update(loss, prompt, head, optimiser, settings.gradient_clip)
            state.losses.append(loss.item())
            state.seen.append(embeddings.detach().float().cpu())
            if not math.isfinite(state.losses[-1]):
                raise TrainingError(
                    f"the loss became {state.losses[-1]} in epoch {epoch + 1}, step {len(state.losses)}; lower "
                    f"learning_rate (now {settings.learning_rate:g}) or raise temperature"
                )
            state.seconds = earlier + time.perf_counter() - began
            if bookmark and bookmark.due():
                state.keep(bookmark, which)
            if on_step:
                rate = (step + 1 - first) / (time.perf_counter() - first_step)
                accuracy = state.history[-1].accuracy if state.history else None
                mean_loss = sum(state.losses) / len(state.losses)
                on_step(
                    Progress(
                        epoch + 1, settings.epochs, step + 1, steps, mean_loss, accuracy,
                        rate * len(rows), (steps - step - 1) / rate,
                    )
                )  # fmt: skip
        state.end_epoch(labels)
    trained = sum(p.numel() for p in (prompt, *head.parameters()))
    return Trained(prompt.detach().cpu(), state.history, state.seconds, trained)


def update(loss: Tensor, prompt: Tensor, head: Head, optimiser: torch.optim.AdamW, clip: float) -> None:
    """One step downhill; the gradients of prompt and head are clipped each by itself."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    for parameters in ([prompt], head.parameters()):
        nn.utils.clip_grad_norm_(parameters, clip)
    optimiser.step()


class State:
    """All that changes while a prompt is trained, so that training can go on in another process."""

    def __init__(self, prompt: nn.Parameter, head: Head, optimiser: torch.optim.AdamW):
        self.parameters = {"prompt": prompt, **{f"head.{name}": p for name, p in head.named_parameters()}}
        self.optimiser = optimiser
        self.history: list[Epoch] = []
        self.seconds = 0.0
        self.order: list[Tensor] = []  # the epoch's batches; of those that are done:
        self.losses: list[float] = []
        self.seen: list[Tensor] = []

    def steps_done(self, steps_per_epoch: int) -> int:
        return len(self.history) * steps_per_epoch + len(self.losses)

    def end_epoch(self, labels: Tensor) -> None:
        self.history.append(_epoch(self.losses, torch.cat(self.seen), labels[torch.cat(self.order)]))
        self.order, self.losses, self.seen = [], [], []

    def keep(self, bookmark: Bookmark, which: dict[str, Any]) -> None:
        """Between two steps of an epoch; `restore` gives the same state to the bit, if `which` is the same."""
        tensors = {
            "order": torch.stack(self.order),
            "seen": torch.cat(self.seen),
            "rng": torch.get_rng_state(),
        }
        for name, parameter in self.parameters.items():
            tensors[name] = parameter.detach()
            tensors |= {f"{name}/{key}": value for key, value in self.optimiser.state[parameter].items()}
        history = [dataclasses.astuple(epoch) for epoch in self.history]
        about = {"history": history, "losses": self.losses, "seconds": self.seconds, "which": which}
        bookmark.save(tensors, about)

    def restore(self, bookmark: Bookmark, which: dict[str, Any]) -> None:
        kept = bookmark.load()
        if kept is None or kept[1]["which"] != which:
            return
        tensors, about = kept
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[name])
            moments = {key: tensors[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimiser.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in moments.items()
            }
        self.history = [Epoch(*epoch) for epoch in about["history"]]
        self.seconds, self.losses = about["seconds"], about["losses"]
        self.order = list(tensors["order"])
        self.seen = [tensors["seen"]]
        torch.set_rng_state(tensors["rng"])


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
    """[S, L, D]: the previous task's prompt if it has this shape, zero, or small random numbers."""
    deep = settings.prompt_kind == "deep"
    shape = backbone.prompt_shape(settings.prompt_length, deep, settings.prompt_from_layer)
    if settings.prompt_start == "random":
        return nn.init.trunc_normal_(torch.empty(shape), std=0.02)
    if start is None or settings.prompt_start == "zero" or start.shape != shape:
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
