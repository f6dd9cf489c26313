"""APER (Zhou et al., IJCV 2024; first called ADAM): adapt to the first task, then merge.

On the first task, a deep prompt or adapters (`first_session`) are trained by cross-entropy under a head that is
discarded. Nothing is trained after that. An image's features are two embeddings side by side,
f(x) = [plain(x), adapted(x)]: one as general as the pre-trained backbone, one adapted to the data. A class is the mean
of its images' features. The prediction is the class whose mean has the largest cosine.

Of the paper's five variants, these are VPT-Deep and Adapter. Defaults are those of the authors' toolbox; their older
code trains on CIFAR-100 for 5 epochs with batches of 16 and a learning rate of 0.05. As there, the head is a scaled
cosine, and all tokens of a prompt start at zero, so they stay equal. Difference: adapters have no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Source, TrainingTask, register_method
from protosteer.methods.first_session import FirstSession, FirstSessionSettings
from protosteer.methods.training_utils import embed_task, number_labels, update_means
from protosteer.settings import setting


@dataclass(frozen=True)
class APERSettings(FirstSessionSettings):
    """Settings of APER; defaults are LAMDA-PILOT's (exps/aper_vpt_deep.json, exps/aper_aperpter.json)."""

    first_session: str = setting("vpt", choices=("vpt", "adapter"))
    epochs: int = setting(20, at_least=1)
    batch_size: int = setting(48, at_least=2)
    learning_rate: float = 0.01


@register_method("aper")
class APER(FirstSession):
    """Adapts to the first task; then a nearest class mean on plain and adapted features."""

    source = Source("Zhou et al.", "Revisiting class-incremental learning with pre-trained models", "IJCV", 2024)
    trains = "a prompt or adapters, on the first task"
    settings_class = APERSettings
    published = {
        "split-cifar100": {},
        "imagenet-r": {"batch_size": 24, "learning_rate": 0.05, "prompt_length": 30},
    }
    published_source = (
        "LAMDA-PILOT, exps/aper_vpt_deep.json and exps/aper_vpt_deep_inr.json. With adapters, it has the defaults on CIFAR-100, "
        "and on ImageNet-R 10 epochs, batches of 16 and weight_decay 0.005 (exps/aper_aperpter_inr.json)"
    )
    grid = {"learning_rate": (0.01, 0.1, 1.0)}
    supports_repeated_classes = True
    state_fields = {**FirstSession.state_fields, "means": "per class", "counts": "per class"}
    test_settings = {"epochs": 2, "batch_size": 8, "prompt_length": 2, "augmentation": "crop"}

    def __init__(self, backbone: Backbone, settings: APERSettings):
        super().__init__(backbone, settings)
        self.means = torch.empty(0, 2 * backbone.dim)  # class means of the features, [K, 2D]
        self.counts = torch.empty(0, dtype=torch.long)  # the number of images of each class, int64 [K]

    def learn(self, task: TrainingTask) -> None:
        """Update the class means; on the first task, adapt before."""
        classes, labels = number_labels(task, self.classes)
        self.adapt(task)
        embeddings = embed_task(task, self.backbone, self.embed_batch_size)
        features = torch.cat([embeddings, self.embed_task(task)], dim=1)
        self.means, self.counts = update_means(self.means, self.counts, features, labels)
        self.tasks.append(classes)

    def answer(self, images: Images) -> Answer:
        """Predict the class whose mean has the largest cosine."""
        features = torch.cat([images.embed(torch.arange(len(images))), self.embed(images)], dim=1)
        similarity = F.normalize(features, dim=1) @ F.normalize(self.means, dim=1).T  # [B, K]
        passes = torch.ones(len(images), dtype=torch.long)
        return Answer(similarity.argmax(dim=1), prompts=passes, scores=similarity)
