"""Knowledge distillation from a frozen copy of the network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.training_utils import Head


class Teacher:
    """A frozen copy of a network: its backbone, and its head over the classes so far."""

    def __init__(self, backbone: Backbone, head: Head):
        self.backbone = backbone.frozen_copy()
        self.weight, self.bias = head.weight.detach().clone(), head.bias.detach().clone()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Compute logits [B, K] of normalised images [B, 3, H, W]."""
        return F.linear(self.backbone.embed(images), self.weight, self.bias)


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute the cross-entropy of softmax(logits / T) against softmax(teacher / T), mean over images; both [B, K].

    Hinton et al. (2015) multiply it by T^2 to preserve the size of gradients; each method here follows its own paper.
    """
    targets = (teacher / temperature).softmax(dim=1)
    return -(targets * (logits / temperature).log_softmax(dim=1)).sum(dim=1).mean()
