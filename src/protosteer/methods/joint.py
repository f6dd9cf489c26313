"""Joint training, the upper bound: after every task a fresh network is trained on all images so far.

Every image of every task is kept, and the whole backbone, from the weights that were given, with a linear head
is fitted to all of them by cross-entropy, as if there had been no sequence (the paper's upper bound, Appendix
"Implementation Details"). What a method without old images loses against this is the price of the sequence.

The paper trains as it trains CPP, but for the learning rate. Of that, warm-up and the rise of the weight decay are
left out here: the rate falls along a cosine to 0, and the weight decay is that of the last step throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.data.images import ImageSet
from protosteer.methods.base import Source, TaskData
from protosteer.methods.finetune_base import Rehearsal
from protosteer.methods.training_utils import Training


@dataclass(frozen=True)
class JointSettings(Training):
    # Of the paper: the learning rate is its upper bound's, all else CPP's.
    epochs: int = 50
    batch_size: int = 256
    learning_rate: float = 1e-4
    schedule: str = "cosine"


class Joint(Rehearsal):
    name = "joint"
    source = Source("Caruana", "Multitask learning", "Machine Learning", 1997)
    settings_class = JointSettings
    again = True
    settings: JointSettings
    grows = True

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        if self.tasks:
            self.start_over()

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        return self.memory.before(images, labels)

    def finish(self, task: TaskData, labels: Tensor, **notes: Tensor) -> None:
        self.memory.offer(task.train, labels, torch.arange(len(self.memory) + len(labels)))
