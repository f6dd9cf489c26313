"""Experience replay: every step learns from the task's images and from as many images of earlier tasks.

Chaudhry et al., On tiny episodic memories in continual learning (2019). A batch of the task is joined with a
batch drawn from the buffer, augmented anew, and cross-entropy over all classes so far runs over both as one.
The buffer is filled by reservoir sampling: of all images ever seen, each is in it with the same probability.

Different here: the paper sees every image once and offers it to the buffer right away, so that a task's own
images are replayed too. Here a task has several epochs, and its images are offered when it is over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protosteer.methods.base import Source
from protosteer.methods.finetune_base import Rehearsal, RehearsalSettings


class ER(Rehearsal):
    name = "er"
    source = Source("Chaudhry et al.", "On tiny episodic memories in continual learning", "arXiv", 2019)
    settings_class = RehearsalSettings
    again = True

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = len(labels)
        if len(self.memory):
            views, rows = self.replayed(own)
            images = torch.cat([images, views])
            labels = torch.cat([labels, self.memory.labels[rows].to(labels.device)])
        value, embeddings = super().loss(images, labels)
        return value, embeddings[:own]
