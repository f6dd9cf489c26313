"""What methods that learn from an earlier self share: that self, frozen, and the loss against what it says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.training_utils import Head


class Teacher:
    """A network as it is now, whatever becomes of it: its backbone, and its head over the classes so far."""

    def __init__(self, backbone: Backbone, head: Head):
        self.backbone = backbone.frozen_copy()
        self.weight, self.bias = head.weight.detach().clone(), head.bias.detach().clone()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> logits [B, K]."""
        return F.linear(self.backbone.embed(images), self.weight, self.bias)


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of softmax(logits / T) against softmax(teacher / T), mean over images; both [B, K].

    Hinton et al. (2015) multiply it by T^2, so that gradients keep their size; methods here do as their papers do.
    """
    wanted = (teacher / temperature).softmax(dim=1)
    return -(wanted * (logits / temperature).log_softmax(dim=1)).sum(dim=1).mean()
