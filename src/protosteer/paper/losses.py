"""Losses of prompt training, as pure functions of tensors.

The contrastive losses are one formula over similarities s_ij = z_i . z_j. For row i,

    L_i = -1/|P(i)| * sum over p in P(i) of [ s_ip / tau - log( sum over n in D(i) of exp(s_in / tau) ) ]

P(i) holds the images of the same class without i itself, N(i) those of other classes. The loss is the mean over rows
with a positive. The losses differ in the denominator D(i) only:

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

# Maps z [N, D] (unit vectors, the neck's output), labels [N], anchors (value prototypes of earlier tasks, or None), settings
# and the training's generator of random numbers to a loss.
Loss = Callable[[Tensor, Tensor, Any, Any, torch.Generator | None], Tensor]
REGISTERED: dict[str, Loss] = {}


def register_loss(name: str) -> Callable[[Loss], Loss]:
    """Register a function as the loss that the setting `loss=name` selects.

    Args:
        name: The value of the setting.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        SettingsError: Another loss has the name (code "duplicate-loss").
    """

    def register(loss: Loss) -> Loss:
        registered = REGISTERED.get(name)
        if name in LOSSES and (registered is None or registered.__qualname__ != loss.__qualname__):
            raise SettingsError(f"loss '{name}' exists already; choose another name", code="duplicate-loss", name=name)
        REGISTERED[name] = loss
        LOSSES[:] = dict.fromkeys([*LOSSES, name])
        return loss

    return register


def contrastive(similarity: Tensor, positives: Tensor, denominator: Tensor, temperature: float) -> Tensor:
    """Compute the formula above for similarities [R, M]; boolean masks [R, M] mark P(i) and D(i).

    A row with an empty denominator (one class and no prototypes) keeps its alignment term alone. Without any positive
    the loss is 0 and stays connected to the graph.
    """
    logits = similarity / temperature
    count = positives.sum(dim=1)  # [R]: |P(i)|
    alignment = (logits * positives).sum(dim=1) / count.clamp(min=1)  # [R]
    has_denominator = denominator.any(dim=1)  # [R]
    # The gradient of logsumexp over a row of -inf is NaN: rows with an empty denominator are not masked.
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
        prototype_labels: [M], none of which is an image's label; needed for `prototype_rows` only.
        uniformity: Put positives into the denominator as well (ablation).
        prototype_rows: Average over prototypes too; positives are others of the same class (authors' code).
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
    is_same_class = column_labels[:rows, None] == column_labels[None, :]  # [R, N + M]
    off_diagonal = ~torch.eye(rows, len(columns), dtype=torch.bool, device=z.device)
    denominator = off_diagonal if uniformity else ~is_same_class
    return contrastive(columns[:rows] @ columns.T, is_same_class & off_diagonal, denominator, temperature)


def supcon(z: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Compute the supervised contrastive loss of z [N, D] with labels [N]: CPL with uniformity, no prototypes (ablation)."""
    return cpl(z, labels, temperature, uniformity=True)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy of logits [N, K] over the task's K classes, labels [N] (ablation)."""
    return F.cross_entropy(_at_least_float32(logits), labels)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
