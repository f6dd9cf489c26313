"""Train the prompt P^t of one task: the inner loop of Algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.paper import diagnostics, losses
from protosteer.paper.prompts import Encoder, initial_prompt
from protosteer.paper.prototypes import Anchors
from protosteer.settings import Settings
from protosteer.util.seeded import seeded
from protosteer.util.training_state import Callback, Epoch, TrainingState

# Maps batches of rows [N] to tokens [N, T, D]: the images, augmented with the training's generator, after the layers that
# the prompt does not enter.
Views = Callable[[Sequence[Tensor], torch.Generator], Iterable[Tensor]]


@dataclass(frozen=True)
class TrainedPrompt:
    """The outcome of training one prompt."""

    prompt: Tensor  # [S, L, D]
    epochs: list[Epoch]
    parameters: int  # number of trained parameters, the neck's included


def train_prompt(
    encoder: Encoder,
    views: Views,
    labels: Tensor,
    settings: Settings,
    start: Tensor | None = None,
    anchors: Anchors | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
) -> TrainedPrompt:
    """Train the prompt P^t of one task, together with a neck that is discarded.

    Args:
        encoder: The frozen ViT.
        views: Yields the augmented batches of the task's n images.
        labels: [n], classes as numbers 0 to K - 1.
        settings: Loss, optimisation, prompt.
        start: The previous task's prompt; see `initial_prompt`.
        anchors: Value prototypes of earlier tasks.
        seed: Seed of the only generator used; torch's global generator stays untouched.
        callbacks: Called during training.

    Raises:
        TrainingError: The loss is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = nn.Parameter(initial_prompt(encoder, settings, start, generator).to(encoder.device))  # [S, L, D]
    head = Head(encoder.dim, int(labels.max()) + 1, settings, generator).to(encoder.device)
    optimiser = torch.optim.AdamW([prompt, *head.parameters()], lr=settings.learning_rate)
    parameters = {"prompt": prompt, **{f"head.{name}": p for name, p in head.named_parameters()}}
    state = TrainingState(parameters, optimiser, labels, settings.batch_size, settings.epochs, generator)
    anchors = anchors.to(encoder.device) if anchors else None
    for callback in callbacks:
        callback.on_train_begin(state)

    while state.epoch < settings.epochs:
        batches = state.remaining_batches()
        for rows, tokens in zip(batches, views(batches, generator), strict=True):  # [N], [N, T, D]
            set_rates(optimiser, state.step, state.steps, settings)
            embeddings = encoder.embed_tokens(tokens, settings.prompt_from_layer - 1, prompt)  # [N, D]
            loss = batch_loss(head, embeddings, labels[rows].to(encoder.device), anchors)
            update(loss, [[prompt], list(head.parameters())], optimiser, settings.gradient_clip)
            state.end_step(loss, embeddings)
            for callback in callbacks:
                callback.on_step_end(state)
        state.end_epoch(diagnostics.accuracy_and_spread)
    return TrainedPrompt(prompt.detach().cpu(), state.history, sum(p.numel() for p in parameters.values()))


def batch_loss(head: Head, embeddings: Tensor, labels: Tensor, anchors: Anchors | None) -> Tensor:
    """Compute the registered or built-in loss of a batch: embeddings [N, D] under the prompt, labels [N]."""
    registered = losses.REGISTERED.get(head.settings.loss)
    if registered is None:
        return head.loss(embeddings, labels, anchors)
    return registered(F.normalize(head.neck(embeddings), dim=1), labels, anchors, head.settings, head.generator)


class Head(nn.Module):
    """The neck m_sigma, an MLP, with the loss of its output."""

    def __init__(self, dim: int, classes: int, settings: Settings, generator: torch.Generator | None = None):
        super().__init__()
        self.settings, self.generator = settings, generator  # None: torch's global generator
        widths = [dim] + [settings.neck_hidden] * (settings.neck_layers - 1) + [dim]
        layers: list[nn.Module] = []
        for inputs, outputs in zip(widths, widths[1:], strict=False):
            layers += [_linear(inputs, outputs, generator), nn.GELU()]
        self.neck = nn.Sequential(*layers[:-1])
        self.classifier = WeightNormLinear(dim, classes, generator) if settings.loss == "cross-entropy" else None

    def loss(self, embeddings: Tensor, labels: Tensor, anchors: Anchors | None) -> Tensor:
        """Compute the built-in loss of a batch: embeddings [N, D] under the prompt, labels [N]."""
        settings, z = self.settings, F.normalize(self.neck(embeddings), dim=1)  # z [N, D]
        if self.classifier is not None:
            return losses.cross_entropy(self.classifier(z), labels)
        if settings.loss == "supcon":
            return losses.supcon(z, labels, settings.temperature)
        count = len(labels) if settings.prototypes_per_step < 0 else settings.prototypes_per_step  # M
        prototypes = prototype_labels = None
        if anchors is not None and count:
            prototypes, prototype_labels = anchors.sample(count, self.generator)  # [M, D], [M]
            prototype_labels = prototype_labels + labels.max() + 1  # distinct from the labels of images
        prototype_rows = settings.anchor_rows == "images+prototypes"
        tau, uniformity = settings.temperature, settings.uniformity
        return losses.cpl(z, labels, tau, prototypes, prototype_labels, uniformity, prototype_rows)


class WeightNormLinear(nn.Module):
    """A weight-normalised linear layer without bias, as in the authors' code: logits g_k cos(v_k, z) of unit vectors z.

    Lengths g_k start at 1 and are trained like the directions v_k.
    """

    def __init__(self, dim: int, classes: int, generator: torch.Generator | None = None):
        super().__init__()
        rows = seeded(lambda: nn.Linear(dim, classes, bias=False), generator).weight
        self.directions = nn.Parameter(rows.detach())  # [K, D]
        self.lengths = nn.Parameter(torch.ones(classes, 1))

    def forward(self, z: Tensor) -> Tensor:
        """Map z [N, D] to logits [N, K]."""
        return F.linear(z, self.lengths * F.normalize(self.directions, dim=1))


def _linear(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    # torch's initialisation is drawn, then overwritten: without it, a seed would give other random numbers from here on.
    layer = seeded(lambda: nn.Linear(inputs, outputs), generator)
    nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def update(loss: Tensor, groups: Sequence[Sequence[Tensor]], optimiser: torch.optim.Optimizer, clip: float) -> None:
    """Backpropagate, clip the gradient of each group of parameters by itself, and step the optimiser."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    for group in groups:
        nn.utils.clip_grad_norm_(group, clip)
    optimiser.step()


def set_rates(optimiser: torch.optim.Optimizer, step: int, steps: int, settings: Settings) -> None:
    """Set learning rate and weight decay of one of `steps` steps, counted from 0."""
    rates = {"lr": learning_rate(step, steps, settings), "weight_decay": weight_decay(step, steps, settings)}
    for group in optimiser.param_groups:
        group.update(rates)


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine down to the final rate."""
    warmup = int(steps * min(settings.warmup_epochs / settings.epochs, settings.warmup_fraction))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return cosine(step - warmup, steps - warmup, settings.learning_rate, settings.final_learning_rate)


def weight_decay(step: int, steps: int, settings: Settings) -> float:
    """Return the weight decay of a step: cosine up to the final one."""
    return cosine(step, steps, settings.weight_decay, settings.final_weight_decay)


def cosine(step: int, steps: int, start: float, end: float) -> float:
    """Return the cosine schedule at a step: `start` at step 0, `end` at the last step."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * step / max(1, steps - 1)))
