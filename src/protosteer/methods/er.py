"""Experience replay (Chaudhry et al.): every step uses the task's images and as many images of earlier tasks.

On tiny episodic memories in continual learning (2019). A batch of the task is joined with a newly augmented batch from
the buffer, and cross-entropy over all classes so far runs over both. The buffer is filled by reservoir sampling: each
image ever offered is in it with the same probability. Images are offered when a step has used them, so a task's own
images are replayed too. As in mammoth, that holds for every epoch; the paper has one. Both train a ResNet by SGD; epochs,
batches and optimiser here are those of `finetune`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protosteer.methods.base import Source, register_method
from protosteer.methods.finetune_base import OnlineRehearsal


@register_method("er")
class ER(OnlineRehearsal):
    """Rehearsal of images and labels."""

    source = Source("Chaudhry et al.", "On tiny episodic memories in continual learning", "arXiv", 2019)
    supports_repeated_classes = True

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cross-entropy over the task's batch and a replayed one; see `Network.loss`."""
        count = len(labels)
        if len(self.buffer):
            views, rows = self.replay(count)
            images = torch.cat([images, views])
            labels = torch.cat([labels, self.buffer.labels[rows].to(labels.device)])
        value, embeddings = super().loss(images, labels)
        return value, embeddings[:count]
