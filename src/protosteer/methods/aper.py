"""APER with a deep prompt (Zhou et al., IJCV 2024; first called ADAM): adapt to the first task, then merge.

On the first task, a deep prompt is trained by cross-entropy under a head that is discarded. Nothing is trained after
that. An image's features are two embeddings side by side, f(x) = [plain(x), prompted(x)]: one as general as the
pre-trained backbone, one adapted to the data. A class is the mean of its images' features. The prediction is the class
whose mean has the largest cosine.

Defaults are those of the authors' toolbox; their older code trains on CIFAR-100 for 5 epochs with batches of 16 and a
learning rate of 0.05. As there, the head is a scaled cosine. Differences: images are augmented as for every other
method here, the learning rate changes at every step, and gradients are clipped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TrainingTask, register_method
from protosteer.methods.per_task_tuning import PromptTraining, tune_deep_prompt
from protosteer.methods.training_utils import embed_task, number_labels, update_means


@register_method("aper")
class APER(Method):
    """Adapts a prompt to the first task; then a nearest class mean on plain and prompted features."""

    source = Source("Zhou et al.", "Revisiting class-incremental learning with pre-trained models", "IJCV", 2024)
    trains = "a prompt, on the first task"
    settings_class = PromptTraining
    supports_repeated_classes = True
    state_fields = {"prompt": "once", "means": "per class", "counts": "per class"}
    test_settings = {"epochs": 2, "batch_size": 8, "prompt_length": 2, "augmentation": "crop"}

    def __init__(self, backbone: Backbone, settings: PromptTraining):
        super().__init__(backbone, settings)
        self.prompt = torch.zeros(backbone.prompt_shape(settings.prompt_length))  # [depth, L, D]
        self.means = torch.empty(0, 2 * backbone.dim)  # class means of the features, [K, 2D]
        self.counts = torch.empty(0, dtype=torch.long)  # the number of images of each class, int64 [K]

    def learn(self, task: TrainingTask) -> None:
        """Update the class means; on the first task, train the prompt before."""
        classes, labels = number_labels(task, self.classes)
        if not self.tasks:
            self.prompt = tune_deep_prompt(task, self.backbone, self.settings)
        plain = embed_task(task, self.backbone, self.embed_batch_size)
        prompted = embed_task(task, self.backbone, self.embed_batch_size, "values", self.prompt)
        features = torch.cat([plain, prompted], dim=1)
        self.means, self.counts = update_means(self.means, self.counts, features, labels)
        self.tasks.append(classes)

    def answer(self, images: Images) -> Answer:
        """Predict the class whose mean has the largest cosine."""
        self.require_knowledge()
        rows = torch.arange(len(images))
        features = torch.cat([images.embed(rows), images.embed(rows, self.prompt, "adapted")], dim=1)
        similarity = F.normalize(features, dim=1) @ F.normalize(self.means, dim=1).T  # [B, K]
        return Answer(similarity.argmax(dim=1), prompts=torch.ones(len(images), dtype=torch.long))

    def trained_parameters(self) -> int:
        """Return the size of the prompt and of the discarded head."""
        return self.prompt.numel() + len(self.tasks[0]) * self.backbone.dim + 1 if self.tasks else 0
