"""Base classes of methods that train the whole backbone under a linear head, with distillation and rehearsal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.data.decode_cache import cache_decoded
from protosteer.data.images import ImageSet
from protosteer.methods.base import Answer, Images, Method, TrainingTask
from protosteer.methods.buffer import Buffer
from protosteer.methods.training_utils import (
    Head,
    TrainingJob,
    TrainingSettings,
    answer_by,
    fit,
    number_labels,
    task_seed,
)
from protosteer.settings import setting


class Network(Method):
    """A trainable copy of the backbone and a head that grows, trained task after task.

    As it stands, this is sequential fine-tuning. A method overrides some of the hooks `begin_task`, `training_set`,
    `loss` or its `criterion`, and `end_task`. The backbone that is given stays as it is.
    """

    trains = "backbone, head"
    trains_backbone = True
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"learning_rate": (1e-4, 3e-5, 3e-4)}
    state_fields = {"vit": "once", "head": "per class"}
    test_settings = {"epochs": 6, "batch_size": 8, "learning_rate": 5e-3, "augmentation": "crop"}
    settings: TrainingSettings
    views: ClassVar[int] = 1  # augmentations of each image of a batch
    optimiser_class: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW
    distils: ClassVar[bool] = False  # from the network before the task: the `teacher`
    restarts: ClassVar[bool] = False  # every task from the pre-trained weights

    def __init__(self, backbone: Backbone, settings: TrainingSettings):
        super().__init__(backbone.trainable_copy(), settings)
        self.pretrained = backbone
        self.head = Head(backbone.dim, backbone.device)
        self.teacher: Teacher | None = None  # while a task is trained, but the first

    @property
    def vit(self) -> nn.Module:
        """The network that is trained under the head."""
        return self.backbone.vit

    def learn(self, task: TrainingTask) -> None:
        """Train on the task, with the hooks before and after it."""
        classes, labels = number_labels(task, self.classes)
        # Seeded by the new classes, or by the task's name if all classes are known.
        self.generator.manual_seed(task_seed(self.settings.seed, classes or [task.name]))
        self.begin_task(task, labels)
        self.head.grow(len(classes), self.generator)
        images, targets = self.training_set(task.train, labels)
        parameters, optimiser = self.parameters(), self.optimiser()
        s, loss, generator = self.settings, self.loss, self.generator
        job = TrainingJob(task, images, targets, self.backbone, parameters, optimiser, loss, s, generator, self.views)
        fit(self.training_job(job))
        if self.distils:
            self.teacher = None
        self.tasks.append(classes)
        self.end_task(task, labels)

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Prepare for a task; the head has no rows for its new classes yet."""
        if self.distils and self.tasks:
            self.teacher = Teacher(self.backbone, self.head)
        if self.restarts and self.tasks:
            self.backbone = self.pretrained.trainable_copy()
            self.head = Head(self.backbone.dim, self.backbone.device)
            self.head.grow(len(self.classes), self.generator)

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """Return the images and labels to train on, given the task's."""
        return images, labels

    def training_job(self, job: TrainingJob) -> TrainingJob:
        """Return the job to train a task by, given the plain one: to do something after each step, for instance."""
        return job

    def optimiser(self) -> torch.optim.Optimizer:
        """Create the optimiser of a task."""
        s = self.settings
        return self.optimiser_class(self.parameters().values(), s.learning_rate, weight_decay=s.weight_decay)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch.

        Args:
            images: Normalised images [views * B, 3, H, W].
            labels: Class numbers [B].

        Returns:
            The loss, and embeddings [B, D] of the images.
        """
        embeddings = self.backbone.embed(images)
        return self.criterion(self.logits(embeddings), labels), embeddings

    def logits(self, embeddings: Tensor) -> Tensor:
        """Compute the logits [B, K] of embeddings [B, D]."""
        return self.head(embeddings)

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of logits [B, K] and labels [B]."""
        return F.cross_entropy(logits, labels)

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Finish a task after training; `tasks` contains its classes already."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters to train, by name."""
        return dict([*self.vit.named_parameters("vit"), *self.head.named_parameters("head")])

    def answer(self, images: Images) -> Answer:
        """Predict the class of the largest logit."""
        return answer_by(self.logits(images.embed(torch.arange(len(images)))))

    def trained_parameters(self) -> int:
        """Return the number of parameters of backbone and head."""
        return sum(p.numel() for p in self.parameters().values())


class Teacher:
    """A frozen copy of a network: its backbone, and its head over the classes so far."""

    def __init__(self, backbone: Backbone, head: Head):
        self.backbone = backbone.frozen_copy()
        self.weight, self.bias = head.weight.detach().clone(), head.bias.detach().clone()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Compute logits [B, K] of normalised images [B, 3, H, W]."""
        return F.linear(self.backbone.embed(images), self.weight, self.bias)


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute the cross-entropy of softmax(logits / T) against softmax(teacher / T), mean over images; both [B, K].

    Hinton et al. (2015) multiply it by T^2 to preserve the size of gradients; each method here follows its own paper.
    """
    targets = (teacher / temperature).softmax(dim=1)
    return -(targets * (logits / temperature).log_softmax(dim=1)).sum(dim=1).mean()


@dataclass(frozen=True)
class RehearsalSettings(TrainingSettings):
    """Settings of methods with a buffer."""

    # As in CPP's Table 1 for 5-datasets, and the middle one of Buzzega et al. (2020). For split CIFAR-100 and
    # ImageNet-R the table has 5,000.
    buffer_size: int = setting(500, at_least=1, at_most=100_000)


class Rehearsal(Network):
    """A network that stores `buffer_size` images, or all, and uses them again in later tasks."""

    uses_rehearsal = True
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "split-cifar100": {"buffer_size": 5000},
        "imagenet-r": {"buffer_size": 5000},
        "five-datasets": {"buffer_size": 500},
    }
    published_source = "CPP's Table 1, of which these are the buffers alone"
    settings_class: ClassVar[type[TrainingSettings]] = RehearsalSettings
    state_fields = {**Network.state_fields, "buffer": "once"}
    test_settings = {**Network.test_settings, "learning_rate": 3e-3, "buffer_size": 20}
    settings: Any

    def __init__(self, backbone: Backbone, settings: TrainingSettings):
        super().__init__(backbone, settings)
        self.buffer = Buffer()

    def replay(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw at most `count` images from the buffer and augment them; returns [b, 3, H, W] and their rows [b]."""
        from protosteer.data.augment import Augmentation

        rows = self.buffer.draw(count, self.generator)
        augment = Augmentation(self.backbone.preprocessing, self.settings.augmentation)
        return augment(self.buffer.pixels[rows].to(self.backbone.device), self.generator), rows


class OnlineRehearsal(Rehearsal):
    """Rehearsal that offers a task's images to the buffer at every step, so the current task is replayed too.

    The buffer is filled by reservoir sampling over all steps of all epochs; an image can be in it more than once.
    """

    def training_job(self, job: TrainingJob) -> TrainingJob:
        """Offer the images of each step to the buffer."""
        images = cache_decoded(job.images)

        def on_step(rows: Tensor) -> None:
            size, generator = self.settings.buffer_size, job.generator
            self.buffer.sample(images, rows, job.labels[rows], size, generator, **self.notes())

        return dataclasses.replace(job, images=images, on_step=on_step, companion=self.buffer)

    def notes(self) -> dict[str, Tensor]:
        """Return what to store with each image of the last step, [B, ...] by name."""
        return {}
