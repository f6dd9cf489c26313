"""Losses of prompt training, as pure functions of tensors.

The contrastive losses are one formula over similarities s, with two masks. For row i,

    L_i = -1/|P(i)| * sum over p in P(i) of [ s_ip / tau - log( sum over n in D(i) of exp(s_in / tau) ) ]

and the loss is the mean over rows that have a positive. They differ in the denominator D(i) only:

    CPL (Eq. 6):          D(i) = N(i) + prototypes            (no positives: no uniformity)
    CPL with uniformity:  D(i) = N(i) + prototypes + P(i)
    SupCon:               D(i) = N(i) + P(i)

Everything is computed in float32 at least, so that half precision embeddings stay finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.errors import SettingsError
from protosteer.settings import LOSSES

# Maps the neck's output, unit vectors [N, D], labels [N], anchors (value prototypes of earlier tasks, or None), settings
# and the generator of everything random in this training to a loss.
Loss = Callable[[Tensor, Tensor, Any, Any, torch.Generator | None], Tensor]
REGISTERED: dict[str, Loss] = {}


def register_loss(name: str) -> Callable[[Loss], Loss]:
    """Register a loss of prompt training: `@register_loss("name")` above a function; then `loss="name"` is a setting.

    Args:
        name: The value of the setting.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        SettingsError: Another loss has the name (code "duplicate-loss").
    """

    def register(loss: Loss) -> Loss:
        known = REGISTERED.get(name)
        if name in LOSSES and (known is None or known.__qualname__ != loss.__qualname__):
            raise SettingsError(f"loss '{name}' exists already; choose another name", code="duplicate-loss", name=name)
        REGISTERED[name] = loss
        LOSSES[:] = dict.fromkeys([*LOSSES, name])
        return loss

    return register


def contrastive(similarity: Tensor, positives: Tensor, denominator: Tensor, temperature: float) -> Tensor:
    """Compute the formula above for similarity [R, M] and boolean masks [R, M].

    A row without a denominator (one class and no prototypes) keeps its alignment term alone. Without any positive at
    all the loss is 0, still connected to the graph.
    """
    logits = similarity / temperature
    count = positives.sum(dim=1)  # [R]: |P(i)|
    alignment = (logits * positives).sum(dim=1) / count.clamp(min=1)  # [R]
    has_denominator = denominator.any(dim=1)  # [R]
    # A row of -inf alone would send NaN into the backward pass: such rows get a harmless 0 instead.
    masked = logits.masked_fill(~denominator & has_denominator[:, None], -torch.inf)
    log_sum = torch.where(has_denominator, masked.logsumexp(dim=1), 0.0)  # [R]
    rows = count > 0
    return ((log_sum - alignment) * rows).sum() / rows.sum().clamp(min=1)


def cpl(
    z: Tensor,
    labels: Tensor,
    temperature: float,
    prototypes: Tensor | None = None,
    prototype_labels: Tensor | None = None,
    uniformity: bool = False,
    prototype_rows: bool = False,
) -> Tensor:
    """Compute the contrastive prototypical loss of N images against M value prototypes of earlier classes (Eq. 6).

    Args:
        z: [N, D], L2-normalised outputs of the neck.
        labels: [N].
        temperature: tau.
        prototypes: [M, D], perturbed and L2-normalised.
        prototype_labels: [M], none of which is an image's; needed for `prototype_rows` alone.
        uniformity: Positives also stand in the denominator (ablation).
        prototype_rows: Each prototype is a row as well, with the others of its class as positives (authors' code).
    """
    z = _at_least_float32(z)
    columns, column_labels = z, labels
    if prototypes is not None and len(prototypes):
        columns = torch.cat([z, prototypes.to(z.dtype)])  # [N + M, D]
        if prototype_labels is None:
            # Equal to no image's label and to no other prototype's: a negative for every row.
            prototype_labels = labels.max() + 1 + torch.arange(len(prototypes), device=labels.device)
        column_labels = torch.cat([labels, prototype_labels])  # [N + M]
    rows = len(columns) if prototype_rows else len(z)  # R
    same = column_labels[:rows, None] == column_labels[None, :]  # [R, N + M]
    other = ~torch.eye(rows, len(columns), dtype=torch.bool, device=z.device)
    denominator = other if uniformity else ~same
    return contrastive(columns[:rows] @ columns.T, same & other, denominator, temperature)


def supcon(z: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Compute the supervised contrastive loss: CPL with uniformity and without prototypes (ablation)."""
    return cpl(z, labels, temperature, uniformity=True)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy of logits [N, K] over the task's own classes (ablation)."""
    return F.cross_entropy(_at_least_float32(logits), labels)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
