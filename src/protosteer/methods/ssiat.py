"""SSIAT (Tan et al., CVPR 2024): semantically shifted incremental adapter-tuning.

One set of adapters beside the MLPs of the frozen backbone is trained by every task, with no penalty on changing it.
The head has a row per class, and logits are cosines over `temperature`. Cross-entropy runs over the task's own classes;
`margin` is first subtracted from the cosine of an image's own class.

Training shifts the features of earlier classes, whose images are gone. The shift of a class mean mu is estimated from
the task's own images, which were embedded before (f) and after (f') the training:

    mu + sum_i w_i (f'_i - f_i) / sum_i w_i,    w_i = exp(-|f_i - mu|^2 / (2 sigma^2)) + 1e-5

The classes of the task are stored as Gaussians of their features. Then the head is aligned as SLCA's is, on features
drawn from the Gaussians of all classes, with its own logits. The next task continues with the aligned head.

Differences from the authors' code: f and f' are of the same image under the evaluation transform; there, both loaders
shuffle and augment, so that a difference is between two images. Adapters have no dropout. A task of one class trains on
the logits of all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.adapters import new_adapters, with_adapters
from protosteer.methods.base import Source, TrainingTask, register_method
from protosteer.methods.slca import SLCA, SLCASettings
from protosteer.methods.training_utils import TrainingJob, embed_task, task_cross_entropy, task_seed
from protosteer.settings import setting

SIGMA = 4.0
RIDGE = 1e-3  # added to covariances by the authors' code


@dataclass(frozen=True)
class SSIATSettings(SLCASettings):
    """Settings of SSIAT; defaults are the authors' (exps_jsons/adapter_cifar224.json)."""

    epochs: int = 20  # of the first task
    later_epochs: int = setting(10, at_least=1, at_most=100_000)
    batch_size: int = 48
    schedule: str = "cosine"
    backbone_rate: float = 1.0  # of the adapters, as a share of the head's
    temperature: float = setting(0.05, above=0)  # 1 / scale
    margin: float = setting(0.0, at_least=0)
    adapter_width: int = setting(64, at_least=1, at_most=2**16)
    adapter_scale: float = 0.1


@register_method("ssiat")
class SSIAT(SLCA):
    """Adapters that all tasks train, shifted class means, and a head that is aligned on Gaussians of all classes."""

    source = Source(
        "Tan et al.", "Semantically-shifted incremental adapter-tuning is a continual ViTransformer", "CVPR", 2024
    )
    trains = "adapters, head"
    settings_class = SSIATSettings
    published = {"split-cifar100": {}, "imagenet-r": {}, "imagenet-a": {"margin": 0.3}}
    published_source = "exps_jsons/*.json of the authors' code (HAIV-Lab/SSIAT); that of CUB lacks the epochs"
    grid = {"learning_rate": (0.01, 0.1, 1.0)}
    state_fields = {"adapters": "once", "head": "per class", "means": "per class", "factors": "per class"}
    test_settings = {
        **SLCA.test_settings, "later_epochs": 5, "adapter_width": 4, "adapter_scale": 1.0, "learning_rate": 0.1,
        "temperature": 0.1,
    }  # fmt: skip
    settings: SSIATSettings

    def __init__(self, backbone: Backbone, settings: SSIATSettings):
        super().__init__(backbone, settings)
        self.generator.manual_seed(task_seed(settings.seed, []))
        self.adapters = new_adapters(backbone, settings.adapter_width, self.generator)
        self.backbone = with_adapters(backbone, self.adapters, settings.adapter_scale, trainable=True)
        self.old_features = torch.empty(0, backbone.dim)  # features of the task's images before its training, [n, D]

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Embed the task's images before training."""
        if self.tasks:
            self.old_features = embed_task(task, self.backbone, self.embed_batch_size, "statistics")

    def training_job(self, job: TrainingJob) -> TrainingJob:
        """Train later tasks for fewer epochs."""
        if not self.tasks:
            return job
        return dataclasses.replace(job, settings=self.settings.replace(epochs=self.settings.later_epochs))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the adapters and the head's rows, by name; a cosine has no bias."""
        return {**dict(self.adapters.named_parameters("adapters")), "head.weight": self.head.weight}

    def logits(self, embeddings: Tensor) -> Tensor:
        """Compute cosines of embeddings [B, D] and the head's rows over the temperature, [B, K]."""
        weight = self.head.weight
        cosines = F.linear(F.normalize(embeddings.to(weight.device), dim=1), F.normalize(weight, dim=1))
        return cosines / self.settings.temperature

    def alignment_logits(self, features: Tensor) -> Tensor:
        """Align on the logits that decide."""
        return self.logits(features)

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy over the task's classes, with a margin on the true class."""
        one_hot = F.one_hot(labels, logits.shape[1])
        logits = logits - one_hot * self.settings.margin / self.settings.temperature
        return task_cross_entropy(logits, labels, len(self.classes))

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Shift earlier means, store the task's Gaussians and align the head."""
        features = embed_task(task, self.backbone, self.embed_batch_size, "statistics")
        earlier_count = len(self.means)
        if earlier_count:
            self.means = shift_means(self.means, self.old_features, features)
        self.add_gaussians(features.double(), labels, RIDGE)
        if earlier_count:
            self.align()


def shift_means(means: Tensor, old_features: Tensor, new_features: Tensor) -> Tensor:
    """Shift class means [K, D] as the features of images near them have moved; old and new features are [n, D]."""
    weights = (torch.cdist(means, old_features).square() / (-2 * SIGMA**2)).exp() + 1e-5  # [K, n]
    return means + weights / weights.sum(dim=1, keepdim=True) @ (new_features - old_features)
