"""Anchors: value prototypes of earlier classes, sampled and perturbed anew at each training step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """A prototypes with the scale m of their noise: mu_hat = mu + m * eps, eps ~ N(0, I).

    means: [A, D]. scales: [A, D], or [A, 1] for one scalar per prototype. labels: [A], classes as numbers.
    """

    means: Tensor
    scales: Tensor
    labels: Tensor

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` perturbed, L2-normalised prototypes, drawn with replacement, and their labels."""
        rows = torch.randint(len(self.means), (count,)).to(self.means.device)
        noise = torch.randn(count, self.means.shape[1]).to(self.means.device)
        return F.normalize(self.means[rows] + self.scales[rows] * noise, dim=1), self.labels[rows]

    def to(self, device: torch.device) -> Anchors:
        return Anchors(self.means.to(device), self.scales.to(device), self.labels.to(device))
