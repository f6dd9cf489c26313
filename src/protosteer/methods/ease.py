"""EASE (Zhou et al., CVPR 2024): adapters for each task, and an ensemble of their feature spaces.

Each task trains adapters beside the MLPs of the frozen backbone, by cross-entropy over its classes under a head that is
discarded. So there are as many feature spaces as tasks; f_s(x) is an image under the adapters of task s. p_s(k) is the
prototype of class k in space s. It is the mean of the class's images in the spaces of its own task and of those before.

When a later task adds a space s, the images of a class k of task t are no longer available. Its prototype in s is
synthesised from the set C of classes that came with s and after. Their weights come from space t, which has them all:

    p_s(k) = sum over c in C of w(c) p_s(c),   w = softmax over C of cos(p_t(k), p_t(c))

The score of class k of task t is cos(f_t(x), p_t(k)) + alpha / (T - 1) times the sum of cos(f_s(x), p_s(k)) over all
other spaces s. With `plain_weight`, the code's `use_init_ptm`, so many times the cosine to the class mean without adapters
is added. The prediction is the class with the largest score.

As in the authors' code, C is updated with every task; in the paper, C is the classes of task s alone. As there, alpha
is split among the other spaces; in the paper, it counts in full for each. Adapters read the residual stream as there.
Difference: adapters have no dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.adapters import new_adapters, with_adapters
from protosteer.methods.base import Answer, Images, Method, Source, TrainingTask, register_method
from protosteer.methods.per_task_tuning import tune_adapters
from protosteer.methods.training_utils import TrainingSettings, class_means, embed_task, number_labels
from protosteer.settings import setting


@dataclass(frozen=True)
class EASESettings(TrainingSettings):
    """Settings of EASE; defaults are the authors' for CIFAR-100 (exps/ease_cifar.json, utils/inc_net.py)."""

    epochs: int = 20
    batch_size: int = 48
    learning_rate: float = 0.025
    schedule: str = "cosine"
    weight_decay: float = 5e-4
    adapter_width: int = setting(64, at_least=1, at_most=2**16)
    adapter_scale: float = 0.1
    alpha: float = setting(0.1, at_least=0)  # the weight of all other spaces beside a class's own
    plain_weight: float = setting(0.0, at_least=0)  # the weight of the space without adapters: beta there


@register_method("ease")
class EASE(Method):
    """Adapters per task, and prototypes of every class in every feature space."""

    source = Source(
        "Zhou et al.",
        "Expandable subspace ensemble for pre-trained model-based class-incremental learning",
        "CVPR",
        2024,
    )
    trains = "adapters per task"
    settings_class = EASESettings
    published = {
        "split-cifar100": {},
        "imagenet-r": {"batch_size": 16, "learning_rate": 0.05, "weight_decay": 5e-3},
        "imagenet-a": {"batch_size": 32, "learning_rate": 0.05, "weight_decay": 5e-3},
        "cub200": {"batch_size": 16, "learning_rate": 5e-3, "alpha": 5e-3, "plain_weight": 1.0},
        "vtab": {"epochs": 45, "batch_size": 16, "learning_rate": 0.03, "weight_decay": 5e-3, "adapter_width": 16},
    }
    published_source = (
        "exps/ease_*.json of the authors' code; not that of OmniBenchmark, where only the first task has adapters"
    )
    # The published rate is for ViT-B and 1,000 steps per task; small backbones and tasks need far larger ones. 2.5 diverges in
    # later tasks of some class orders.
    grid = {"learning_rate": (0.025, 0.25, 1.0)}
    state_fields = {"adapters": "per task", "prototypes": "once", "plain": "once"}
    test_settings = {
        "epochs": 2, "batch_size": 8, "adapter_width": 4, "adapter_scale": 1.0, "augmentation": "crop",
        "learning_rate": 0.3,
    }  # fmt: skip

    def __init__(self, backbone: Backbone, settings: EASESettings):
        super().__init__(backbone, settings)
        self.adapters = nn.ModuleList()  # one ModuleList of adapters per task
        self.spaces: list[Backbone] = []  # the backbone with each task's adapters
        self.prototypes = torch.empty(0, 0, backbone.dim)  # of each class in each space, [T, K, D]
        self.plain = torch.empty(0, backbone.dim)  # class means without adapters, [K, D]; none if they have no weight

    def learn(self, task: TrainingTask) -> None:
        """Train the task's adapters, then update the prototypes in all spaces."""
        s, (classes, labels) = self.settings, number_labels(task, [])
        self.add_space(tune_adapters(task, self.backbone, s, s.adapter_width, s.adapter_scale))
        self.tasks.append(classes)
        embeddings = (embed_task(task, space, self.embed_batch_size, "prototypes") for space in self.spaces)
        new_prototypes = torch.stack([class_means(rows, labels) for rows in embeddings])
        if s.plain_weight:
            plain_embeddings = embed_task(task, self.backbone, self.embed_batch_size, "prototypes")
            self.plain = torch.cat([self.plain, class_means(plain_embeddings, labels)])
        old_prototypes = F.pad(self.prototypes, (0, 0, 0, 0, 0, 1))  # one more space, which `synthesise` fills
        prototypes = torch.cat([old_prototypes, new_prototypes], dim=1)
        self.prototypes = synthesise(prototypes, [len(names) for names in self.tasks])

    def add_space(self, adapters: nn.ModuleList) -> None:
        """Add the feature space of a task's adapters."""
        self.adapters.append(adapters)
        self.spaces.append(with_adapters(self.backbone, adapters, self.settings.adapter_scale, trainable=False))

    def answer(self, images: Images) -> Answer:
        """Predict the class with the largest score over all spaces."""
        rows = torch.arange(len(images))
        features = [images.embed(rows, key=f"adapter {t}", backbone=b) for t, b in enumerate(self.spaces)]
        counts = [len(names) for names in self.tasks]
        class_scores = scores(torch.stack(features), self.prototypes, counts, self.settings.alpha)
        passes = torch.full((len(images),), len(self.tasks) - 1)  # after the first one
        if weight := self.settings.plain_weight:
            cosines = weight * F.normalize(images.embed(rows), dim=1) @ F.normalize(self.plain, dim=1).T
            class_scores = class_scores + cosines
            passes += 1
        return Answer(class_scores.argmax(dim=1), prompts=passes, scores=class_scores)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore prototypes and adapters; see `Method.load_state_dict`."""
        self.adapters, self.spaces = nn.ModuleList(), []
        for _ in self.tasks:
            self.add_space(new_adapters(self.backbone, self.settings.adapter_width, self.generator))
        super().load_state_dict(tensors)

    def bytes_per_task(self) -> list[int]:
        """Return the bytes of a task's adapters, its classes in all spaces so far, and earlier classes in its own."""
        counts, class_count, sizes = [len(task) for task in self.tasks], 0, []
        for t, (count, adapters) in enumerate(zip(counts, self.adapters, strict=True)):
            numbers = ((t + 1 + bool(self.settings.plain_weight)) * count + class_count) * self.backbone.dim
            sizes.append(4 * (numbers + sum(p.numel() for p in adapters.parameters())))
            class_count += count
        return sizes

    def trained_parameters(self) -> int:
        """Return the size of the adapters and of the discarded heads."""
        heads = len(self.classes) * self.backbone.dim + len(self.tasks)
        return heads + sum(p.numel() for p in self.adapters.parameters())


def synthesise(prototypes: Tensor, counts: Sequence[int]) -> Tensor:
    """Fill in prototypes [T, K, D] of earlier classes in later spaces; `counts` has the number of classes of each task."""
    prototypes, starts = prototypes.clone(), [sum(counts[:t]) for t in range(len(counts))]
    for t, count in enumerate(counts):
        class_rows = slice(starts[t], starts[t] + count)
        for s in range(t + 1, len(counts)):
            cosine = F.normalize(prototypes[t, class_rows], dim=1) @ F.normalize(prototypes[t, starts[s] :], dim=1).T
            prototypes[s, class_rows] = cosine.softmax(dim=1) @ prototypes[s, starts[s] :]
    return prototypes


def scores(features: Tensor, prototypes: Tensor, counts: Sequence[int], alpha: float) -> Tensor:
    """Score images in all spaces [T, B, D] against classes in all spaces [T, K, D]; returns [B, K]."""
    cosine = F.normalize(features, dim=2) @ F.normalize(prototypes, dim=2).mT  # [T, B, K]
    task_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    indicator = F.one_hot(task_of, len(counts)).T  # [T, K]
    weights = indicator + (1 - indicator) * alpha / max(1, len(counts) - 1)
    return (weights[:, None] * cosine).sum(dim=0)
