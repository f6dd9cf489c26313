"""Train one prompt: a task's images in, P^t out (the inner loop of Algorithm 1)."""

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

# Maps batches of rows [N] to their images, newly augmented by the training's generator, as tokens [N, T, D] after the
# layers without a prompt.
Views = Callable[[Sequence[Tensor], torch.Generator], Iterable[Tensor]]


@dataclass(frozen=True)
class Trained:
    """A trained prompt."""

    prompt: Tensor  # [S, L, D]
    epochs: list[Epoch]
    parameters: int  # trained, the neck included


def train_prompt(
    encoder: Encoder,
    views: Views,
    labels: Tensor,
    settings: Settings,
    start: Tensor | None = None,
    anchors: Anchors | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Train the prompt P^t of one task, and a neck that is thrown away.

    Args:
        encoder: The frozen ViT.
        views: Gives the task's images in batches.
        labels: [n], 0 to K - 1.
        settings: Loss, optimisation, prompt.
        start: The previous task's prompt; see `initial_prompt`.
        anchors: Value prototypes of earlier tasks.
        seed: Of the one generator that everything random is drawn by; torch's own is neither read nor moved.
        callbacks: Follow the training.

    Raises:
        TrainingError: The loss is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = nn.Parameter(initial_prompt(encoder, settings, start, generator).to(encoder.device))  # [S, L, D]
    head = Head(encoder.dim, int(labels.max()) + 1, settings, generator).to(encoder.device)
    optimiser = torch.optim.AdamW([prompt, *head.parameters()], lr=settings.learning_rate)
    trained = {"prompt": prompt, **{f"head.{name}": p for name, p in head.named_parameters()}}
    state = TrainingState(trained, optimiser, labels, settings.batch_size, settings.epochs, generator)
    anchors = anchors.to(encoder.device) if anchors else None
    for callback in callbacks:
        callback.on_train_begin(state)

    while state.epoch < settings.epochs:
        batches = state.remaining_batches()
        for rows, tokens in zip(batches, views(batches, generator), strict=True):  # [N], [N, T, D]
            set_rates(optimiser, state.step, state.steps, settings)
            embeddings = encoder.rest(tokens, settings.prompt_from_layer - 1, prompt)  # [N, D]
            loss = batch_loss(head, embeddings, labels[rows].to(encoder.device), anchors)
            update(loss, [[prompt], list(head.parameters())], optimiser, settings.gradient_clip)
            state.end_step(loss, embeddings)
            for callback in callbacks:
                callback.on_step_end(state)
        state.end_epoch(diagnostics.accuracy_and_spread)
    return Trained(prompt.detach().cpu(), state.history, sum(p.numel() for p in trained.values()))


def batch_loss(head: Head, embeddings: Tensor, labels: Tensor, anchors: Anchors | None) -> Tensor:
    """Loss of a batch: embeddings [N, D] under the prompt, labels [N]; that of `register_loss`, or the paper's."""
    own = losses.REGISTERED.get(head.settings.loss)
    if own is None:
        return head.loss(embeddings, labels, anchors)
    return own(F.normalize(head.neck(embeddings), dim=1), labels, anchors, head.settings, head.generator)


class Head(nn.Module):
    """The neck m_sigma, an MLP, and the loss behind it."""

    def __init__(self, dim: int, classes: int, settings: Settings, generator: torch.Generator | None = None):
        super().__init__()
        self.settings, self.generator = settings, generator  # None: torch's own
        widths = [dim] + [settings.neck_hidden] * (settings.neck_layers - 1) + [dim]
        layers: list[nn.Module] = []
        for inputs, outputs in zip(widths, widths[1:], strict=False):
            layers += [_linear(inputs, outputs, generator), nn.GELU()]
        self.neck = nn.Sequential(*layers[:-1])
        self.classifier = WeightNormLinear(dim, classes, generator) if settings.loss == "cross-entropy" else None

    def loss(self, embeddings: Tensor, labels: Tensor, anchors: Anchors | None) -> Tensor:
        """Loss of a batch: embeddings [N, D] under the prompt, labels [N]."""
        settings, z = self.settings, F.normalize(self.neck(embeddings), dim=1)  # z [N, D]
        if self.classifier is not None:
            return losses.cross_entropy(self.classifier(z), labels)
        if settings.loss == "supcon":
            return losses.supcon(z, labels, settings.temperature)
        count = len(labels) if settings.prototypes_per_step < 0 else settings.prototypes_per_step  # M
        sampled = sampled_labels = None
        if anchors is not None and count:
            sampled, sampled_labels = anchors.sample(count, self.generator)  # [M, D], [M]
            sampled_labels = sampled_labels + labels.max() + 1  # none of the task's own labels
        rows = settings.anchor_rows == "images+prototypes"
        return losses.cpl(z, labels, settings.temperature, sampled, sampled_labels, settings.uniformity, rows)


class WeightNormLinear(nn.Module):
    """Logits g_k cos(v_k, z) of unit vectors z: a linear layer without bias, weight-normalised, as the authors' code has.

    Every length g_k starts at 1 and is trained like the directions.
    """

    def __init__(self, dim: int, classes: int, generator: torch.Generator | None = None):
        super().__init__()
        rows = seeded(lambda: nn.Linear(dim, classes, bias=False), generator).weight
        self.directions = nn.Parameter(rows.detach())  # [K, D]
        self.lengths = nn.Parameter(torch.ones(classes, 1))

    def forward(self, z: Tensor) -> Tensor:
        """Map [N, D] to logits [N, K]."""
        return F.linear(z, self.lengths * F.normalize(self.directions, dim=1))


def _linear(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    # torch's initialisation is drawn and discarded: the numbers that follow are part of what a seed means.
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
    """Set learning rate and weight decay for a step."""
    rates = {"lr": learning_rate(step, steps, settings), "weight_decay": weight_decay(step, steps, settings)}
    for group in optimiser.param_groups:
        group.update(rates)


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Linear warm-up, then cosine down to the final rate."""
    warm = int(steps * min(settings.warmup_epochs / settings.epochs, settings.warmup_fraction))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return cosine(step - warm, steps - warm, settings.learning_rate, settings.final_learning_rate)


def weight_decay(step: int, steps: int, settings: Settings) -> float:
    """Cosine up to the final weight decay."""
    return cosine(step, steps, settings.weight_decay, settings.final_weight_decay)


def cosine(step: int, steps: int, start: float, end: float) -> float:
    """`start` at step 0, `end` at the last step."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * step / max(1, steps - 1)))
