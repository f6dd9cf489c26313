"""GDumb (Prabhu et al.): store a balanced set of images, and train a network on it from scratch after every task.

GDumb: a simple approach that questions our progress in continual learning (ECCV 2020). The buffer takes images greedily
while their class has less than its share; once it is full, images of the largest class are removed. After every task,
the network restarts from the given weights and is trained on the buffer alone, with CutMix: in half of the steps, a box
of each image is covered by that of another image of the batch, and the loss weighs both labels by area. Earlier
trainings have no influence.

Differences: the paper trains small networks from random weights by SGD, from 0.05 down to 0.0005 with warm restarts
after a first epoch at a tenth of that, for up to 256 epochs. This is AdamW at the rate and weight decay
of `finetune`, which suit pre-trained weights, along one cosine, for fewer epochs. Which images of a class are removed is random: a task's
images are shuffled, and the last of a class go first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.data.images import ImageSet
from protosteer.methods.base import Source, register_method
from protosteer.methods.finetune_base import Rehearsal, RehearsalSettings
from protosteer.settings import setting


@dataclass(frozen=True)
class GDumbSettings(RehearsalSettings):
    """Settings of GDumb."""

    epochs: int = 50  # our choice: with 500 images as many steps as 5 epochs of 5,000 images
    batch_size: int = 16  # as the authors' code, src/opts.py
    schedule: str = "cosine"
    cutmix: float = setting(0.5, at_least=0, at_most=1)  # probability per batch, as the authors' code


@register_method("gdumb")
class GDumb(Rehearsal):
    """A balanced buffer, and a network that is retrained on it."""

    source = Source(
        "Prabhu et al.", "GDumb: a simple approach that questions our progress in continual learning", "ECCV", 2020
    )
    settings_class = GDumbSettings
    published = {
        **{name: {**values, "epochs": 256} for name, values in Rehearsal.published.items()},
        "tiny-imagenet": {"buffer_size": 4500, "epochs": 128},
    }
    published_source = (
        "CPP's Table 1 (buffers) and the paper (epochs); Tiny-ImageNet: scripts/replicate.sh of the authors' code"
    )
    supports_repeated_classes = True
    test_settings = {**Rehearsal.test_settings, "epochs": 12}
    restarts = True
    settings: GDumbSettings

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """Update the buffer and return it."""
        self.buffer.offer_balanced(images, labels, self.settings.buffer_size, self.generator)
        return self.buffer.images, self.buffer.labels

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cross-entropy, with CutMix in some steps; see `Network.loss`."""
        if torch.rand((), generator=self.generator) >= self.settings.cutmix:
            return super().loss(images, labels)
        mixed, partners, share = cutmix(images, self.generator)
        embeddings = self.backbone.embed(mixed)
        logits = self.head(embeddings)
        own, other = F.cross_entropy(logits, labels), F.cross_entropy(logits, labels[partners])
        return (1 - share) * own + share * other, embeddings


def cutmix(images: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, float]:
    """Cover a box of each image [B, 3, H, W] by that of its partner in the batch; the box is the same for all.

    Returns the images, the rows of the partners [B], and the box's share of the area, which is uniform in 0..1 before the
    box is cut off at the edge.
    """
    height, width = images.shape[2:]
    side = float(torch.rand((), generator=generator)) ** 0.5
    middle = torch.rand(2, generator=generator)
    boxes = [
        (round(max(0.0, float(m) - side / 2) * n), round(min(1.0, float(m) + side / 2) * n))
        for m, n in zip(middle, (height, width), strict=True)
    ]
    (top, bottom), (left, right) = boxes
    partners = torch.randperm(len(images), generator=generator)
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[partners, :, top:bottom, left:right]
    return mixed, partners, (bottom - top) * (right - left) / (height * width)
