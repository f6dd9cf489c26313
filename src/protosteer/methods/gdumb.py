"""GDumb (Prabhu et al.): store a balanced set of images, and train a network on it from scratch after every task.

GDumb: a simple approach that questions our progress in continual learning (ECCV 2020). The buffer takes images greedily
while their class has less than its share; once it is full, images of the largest class are removed. After every task,
the network restarts from the given weights and is trained on the buffer alone, with CutMix. In half of the steps,
CutMix covers a box of each image by that of another image of the batch, and the loss weighs both labels by area.
Earlier trainings have no influence.

Differences: the paper trains small networks from random weights by SGD for up to 256 epochs. Its rate falls from 0.05
to 0.0005 with warm restarts, after a first epoch at a tenth of that. Here, AdamW has the rate and weight decay of
`finetune`, which suit pre-trained weights, along one cosine, for fewer epochs. A task's images are shuffled, so the
images of a class that are removed are random: the last ones.
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
        mixed_images, partners, share = cutmix(images, self.generator)
        embeddings = self.backbone.embed(mixed_images)
        logits = self.head(embeddings)
        label_loss, partner_loss = F.cross_entropy(logits, labels), F.cross_entropy(logits, labels[partners])
        return (1 - share) * label_loss + share * partner_loss, embeddings


def cutmix(images: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, float]:
    """Cover a box of each image [B, 3, H, W] by that of its partner in the batch; the box is the same for all.

    Returns the images, the rows of the partners [B], and the box's share of the area. The share is uniform in 0..1 before
    the box is cut off at the edge.
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
    mixed_images = images.clone()
    mixed_images[:, :, top:bottom, left:right] = images[partners, :, top:bottom, left:right]
    return mixed_images, partners, (bottom - top) * (right - left) / (height * width)
