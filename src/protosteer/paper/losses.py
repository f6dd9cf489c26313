"""Losses of prompt training, as pure functions of tensors.

All contrastive losses here are one formula over a matrix of similarities s, with two masks. For row i,

    L_i = -1/|P(i)| * sum over p in P(i) of [ s_ip / tau - log( sum over n in D(i) of exp(s_in / tau) ) ]

and the loss is the mean over rows that have a positive. They differ in the denominator D(i) only:

    contrastive prototypical (CPL, Eq. 6):  D(i) = N(i) + prototypes     (no positives: no uniformity)
    CPL with uniformity:                    D(i) = N(i) + prototypes + P(i)
    SupCon:                                 D(i) = N(i) + P(i)

Everything is computed in float32 at least, so that half precision embeddings stay finite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def contrastive(similarity: Tensor, positives: Tensor, denominator: Tensor, temperature: float) -> Tensor:
    """The formula above for similarity [R, M] and boolean masks [R, M].

    A row without a denominator (one class and no prototypes) keeps its alignment term alone; without
    any positive at all the loss is 0, still connected to the graph.
    """
    logits = similarity / temperature
    count = positives.sum(dim=1)
    alignment = (logits * positives).sum(dim=1) / count.clamp(min=1)
    has_denominator = denominator.any(dim=1)
    # A row of -inf alone would send NaN into the backward pass: such rows see a harmless 0 instead.
    masked = logits.masked_fill(~denominator & has_denominator[:, None], -torch.inf)
    log_sum = torch.where(has_denominator, masked.logsumexp(dim=1), 0.0)
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
    """Contrastive prototypical loss of N images, against M value prototypes of earlier classes.

    z: [N, D], L2-normalised neck outputs. labels: [N]. prototypes: [M, D], L2-normalised, perturbed.
    prototype_labels: [M], needed for `prototype_rows` alone; no label may be one of the images'.
    uniformity: positives also stand in the denominator. prototype_rows: each prototype is a row of its
    own as well, with the other prototypes of its class as positives (what the public code does).
    """
    z = _at_least_float32(z)
    n = len(z)
    columns, column_labels = z, labels
    if prototypes is not None and len(prototypes):
        columns = torch.cat([z, prototypes.to(z.dtype)])
        if prototype_labels is None:
            # Never equal to an image's label, and equal to no other's: a negative for every row.
            prototype_labels = labels.max() + 1 + torch.arange(len(prototypes), device=labels.device)
        column_labels = torch.cat([labels, prototype_labels])
    rows = len(columns) if prototype_rows else n
    same = column_labels[:rows, None] == column_labels[None, :]
    other = ~torch.eye(rows, len(columns), dtype=torch.bool, device=z.device)
    positives = same & other
    denominator = other if uniformity else ~same
    return contrastive(columns[:rows] @ columns.T, positives, denominator, temperature)


def supcon(z: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss: CPL with uniformity and without prototypes."""
    return cpl(z, labels, temperature, uniformity=True)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over the task's own classes."""
    return F.cross_entropy(_at_least_float32(logits), labels)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
