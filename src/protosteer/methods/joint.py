"""Joint training, the upper bound: after every task a fresh network is trained on all images so far.

Every image of every task is kept, and the whole backbone, from the weights that were given, with a linear head
is fitted to all of them by cross-entropy, as if there had been no sequence (the paper's upper bound, Appendix
"Implementation Details"). What a method without old images loses against this is the price of the sequence.

The paper trains as it trains CPP, but for the learning rate. Of that, warm-up and the rise of the weight decay are
left out here: the rate falls along a cosine to 0, and the weight decay is that of the last step throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.methods.base import Lesson, Source
from protosteer.methods.buffer import Buffer
from protosteer.methods.network import Network
from protosteer.methods.toolkit import Training


@dataclass(frozen=True)
class JointSettings(Training):
    # Of the paper: the learning rate is its upper bound's, all else CPP's.
    epochs: int = 50
    batch_size: int = 256
    learning_rate: float = 1e-4
    schedule: str = "cosine"


class Joint(Network):
    name = "joint"
    source = Source("Caruana", "Multitask learning", "Machine Learning", 1997)
    settings_class = JointSettings
    buffer = True
    grows = True

    def __init__(self, backbone: Backbone, settings: JointSettings):
        super().__init__(backbone, settings)
        self.memory = Buffer()

    def prepare(self, task: Lesson, labels: Tensor) -> None:
        if self.tasks:
            self.start_over()

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        return self.memory.before(images, labels)

    def finish(self, task: Lesson, labels: Tensor) -> None:
        self.memory.offer(task.train, labels, torch.arange(len(self.memory) + len(labels)))

    def extras(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        self.memory.put_back(tensors)
