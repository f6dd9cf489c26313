"""Joint training, the upper bound: after every task, train a new network on all images so far.

Every image of every task is stored. Cross-entropy over all of them trains the whole backbone, from the given weights,
and a linear head (the paper's upper bound, Appendix "Implementation Details"). The difference to this accuracy is what
a method without old images loses by learning in sequence.

The paper trains as it trains CPP, except for the learning rate. Here, warm-up and the rise of the weight decay are
omitted: the rate falls along a cosine to 0, and the weight decay is that of the last step throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protosteer.data.images import ImageSet
from protosteer.methods.base import Source, TrainingTask, register_method
from protosteer.methods.finetune_base import Network, Rehearsal
from protosteer.methods.training_utils import TrainingSettings


@dataclass(frozen=True)
class JointSettings(TrainingSettings):
    """Settings of joint training; the learning rate is the paper's upper bound's, the rest CPP's."""

    epochs: int = 50
    batch_size: int = 256
    learning_rate: float = 1e-4
    schedule: str = "cosine"


@register_method("joint")
class Joint(Rehearsal):
    """A network that is retrained on all images of all tasks."""

    source = Source("Caruana", "Multitask learning", "Machine Learning", 1997)
    settings_class = JointSettings
    published = dict.fromkeys(("split-cifar100", "imagenet-r", "five-datasets", "imagenet-subset"), {})
    published_source = "CPP's appendix"
    supports_repeated_classes = True
    state_grows = True
    test_settings = Network.test_settings
    restarts = True
    settings: JointSettings

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """Return the images of all tasks so far."""
        return self.buffer.joined_with(images, labels)

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Store all images of the task."""
        self.buffer.offer(task.train, labels, torch.arange(len(self.buffer) + len(labels)))
