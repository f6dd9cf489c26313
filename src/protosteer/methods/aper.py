"""APER with a deep prompt (Zhou et al., IJCV 2024, first called ADAM): fit to the first task, then merge.

On the first task a deep prompt is trained by cross-entropy under a head that is thrown away; nothing is
trained ever after. An image's features are two embeddings side by side, f(x) = [plain(x), prompted(x)]: one
is as general as the pre-trained backbone, the other fits the data better. A class is the mean of its images'
features, and the mean that is most similar by the cosine wins.

Defaults are those of the authors' toolbox; their older code trains on CIFAR-100 for 5 epochs with batches of
16 and a learning rate of 0.05. As there, the head compares by a scaled cosine. Unlike there, images are
augmented as for every other method here, the rate falls step by step, and gradients are clipped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.per_task_tuning import PromptTraining, adapted_prompt
from protosteer.methods.training_utils import embedded, grown_means, numbered
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage


class APER(Method):
    name = "aper"
    source = Source(
        "Zhou et al.",
        "Revisiting class-incremental learning with pre-trained models",
        "IJCV",
        2024,
    )
    trains = "a prompt, on the first task"
    settings_class = PromptTraining
    again = True

    def __init__(self, backbone: Backbone, settings: PromptTraining):
        super().__init__(backbone, settings)
        self.prompt = torch.zeros(backbone.prompt_shape(settings.prompt_length))  # [depth, L, D]
        self.means = torch.empty(0, 2 * backbone.dim)  # [K, 2D]
        self.counts = torch.empty(0, dtype=torch.long)  # [K]: the images of each class

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        classes, labels = numbered(task, self.classes)
        if not self.tasks:
            self.prompt = adapted_prompt(task, self.backbone, self.settings, on_stage, checkpoint)
        plain = embedded(task, self.backbone, self.embed_batch_size, on_stage)
        prompted = embedded(task, self.backbone, self.embed_batch_size, on_stage, "values", self.prompt)
        both = torch.cat([plain, prompted], dim=1)
        self.means, self.counts = grown_means(self.means, self.counts, both, labels)
        self.tasks.append(classes)

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        rows = torch.arange(len(images))
        features = torch.cat([images.embed(rows), images.embed(rows, self.prompt, "adapted")], dim=1)
        similarity = F.normalize(features, dim=1) @ F.normalize(self.means, dim=1).T  # [B, K]
        return Answer(similarity.argmax(dim=1), prompts=torch.ones(len(images), dtype=torch.long))

    def tensors(self) -> dict[str, Tensor]:
        return {"prompt": self.prompt, "means": self.means, "counts": self.counts}

    def bytes_per_task(self) -> list[int]:
        """Every task brings its classes' means, the first one the prompt too."""
        means = [(4 * self.means.shape[1] + 8) * len(task) for task in self.tasks]
        return [means[0] + self.prompt.nbytes, *means[1:]] if means else []

    def trained_parameters(self) -> int:
        """The prompt, and the head that was thrown away."""
        return self.prompt.numel() + len(self.tasks[0]) * self.backbone.dim + 1 if self.tasks else 0
