"""GDumb: keep a balanced handful of images, and when asked, train a network on them from the beginning.

Prabhu et al., GDumb: a simple approach that questions our progress in continual learning (ECCV 2020). The
buffer takes images greedily as long as their class has fewer than its share; once it is full, those of the
largest class make room. After every task the network starts over from the given weights and is trained on the
buffer alone, with CutMix: in half of the steps a box of each image is covered by that of another one of the
batch, and the loss is shared between both labels by area. What earlier trainings led to plays no part.

Different here: the paper trains small networks from random weights by SGD, from 0.05 down to 0.0005 with warm
restarts, after a first epoch at a tenth of that, up to 256 times over the buffer; this is AdamW at the rate of
`Training`, which suits pre-trained weights, along one cosine, for fewer epochs. Which images of a class go is
drawn by putting a task's images in random order and letting the last of a class go first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.data.images import ImageSet
from protosteer.methods.base import Source, TaskData
from protosteer.methods.finetune_base import Rehearsal, RehearsalSettings
from protosteer.settings import setting


@dataclass(frozen=True)
class GDumbSettings(RehearsalSettings):
    epochs: int = 50  # our choice: with 500 images as many steps as 5 epochs of 5,000 images
    batch_size: int = 16  # as the authors' code, src/opts.py
    schedule: str = "cosine"
    # Probability that a batch is mixed; as the authors' code.
    cutmix: float = setting(0.5, at_least=0, at_most=1)


class GDumb(Rehearsal):
    name = "gdumb"
    source = Source(
        "Prabhu et al.",
        "GDumb: a simple approach that questions our progress in continual learning",
        "ECCV",
        2020,
    )
    settings_class = GDumbSettings
    again = True
    settings: GDumbSettings

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        if self.tasks:
            self.start_over()

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        self.memory.share_out(images, labels, self.settings.buffer_size)
        return self.memory.images, self.memory.labels

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if torch.rand(()) >= self.settings.cutmix:
            return super().loss(images, labels)
        mixed, partners, share = cutmix(images)
        embeddings = self.backbone.embed(mixed)
        logits = self.head(embeddings)
        own, other = F.cross_entropy(logits, labels), F.cross_entropy(logits, labels[partners])
        return (1 - share) * own + share * other, embeddings

    def finish(self, task: TaskData, labels: Tensor, **notes: Tensor) -> None:
        """Nothing more is kept than what was trained on."""


def cutmix(images: Tensor) -> tuple[Tensor, Tensor, float]:
    """A box of each image [B, 3, H, W], the same for all, covered by that of its partner in the batch.

    With the rows of the partners [B] and the box's share of the area, which is uniform in 0..1 before the box
    is cut off at the edge. By torch's generator.
    """
    height, width = images.shape[2:]
    side = float(torch.rand(())) ** 0.5
    middle = torch.rand(2)
    boxes = [
        (round(max(0.0, float(m) - side / 2) * n), round(min(1.0, float(m) + side / 2) * n))
        for m, n in zip(middle, (height, width), strict=True)
    ]
    (top, bottom), (left, right) = boxes
    partners = torch.randperm(len(images))
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[partners, :, top:bottom, left:right]
    return mixed, partners, (bottom - top) * (right - left) / (height * width)
