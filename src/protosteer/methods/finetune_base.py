"""Methods that train the whole backbone under a linear head: all but what makes each of them special."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.data.images import ImageSet
from protosteer.methods.base import Answer, Images, Method, TaskData
from protosteer.methods.buffer import Buffer, reservoir
from protosteer.methods.training_utils import Head, Training, answer_by, fit, numbered, task_seed
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import setting


class Network(Method):
    """A trainable copy of the backbone and a head that grows, trained task after task.

    As it stands it is sequential fine-tuning. A method overrides `prepare`, `training_set`, `loss` and
    `finish`, and names in `extras` what it keeps beside the network.
    """

    trains = "backbone, head"
    trains_backbone = True
    views: ClassVar[int] = 1  # augmentations of each image of a batch
    settings: Training

    def __init__(self, backbone: Backbone, settings: Training):
        super().__init__(backbone.trainable_copy(), settings)
        self.given = backbone
        self.head = Head(backbone.dim, backbone.device)

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        classes, labels = numbered(task, self.classes)
        with torch.random.fork_rng():
            # A task of known classes alone has none that no other task has, but its name.
            torch.manual_seed(task_seed(self.settings.seed, classes or [task.name]))
            self.prepare(task, labels)
            self.head.grow(len(classes))
            images, targets = self.training_set(task.train, labels)
            optimiser = self.optimiser()
            fit(
                task.name,
                images,
                targets,
                self.backbone,
                self.parameters(),
                optimiser,
                self.loss,
                self.settings,
                on_stage,
                checkpoint,
                self.views,
            )
            self.tasks.append(classes)
            self.finish(task, labels)

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        """Before training: the head has no rows for the task's new classes yet."""

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """What is trained on: the task's own images, or some of them with others."""
        return images, labels

    def optimiser(self) -> torch.optim.Optimizer:
        s = self.settings
        return torch.optim.AdamW(self.parameters().values(), s.learning_rate, weight_decay=s.weight_decay)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self.backbone.embed(images)
        return F.cross_entropy(self.head(embeddings), labels), embeddings

    def finish(self, task: TaskData, labels: Tensor) -> None:
        """After training: its classes are known now."""

    def extras(self) -> dict[str, Tensor]:
        """What is kept beside the network."""
        return {}

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        """What `extras` gave."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained."""
        return dict([*self.backbone.vit.named_parameters("vit"), *self.head.named_parameters("head")])

    def start_over(self) -> None:
        """The network as it was before the first task, with a head of new rows for all classes so far."""
        self.backbone = self.given.trainable_copy()
        self.head = Head(self.backbone.dim, self.backbone.device)
        self.head.grow(len(self.classes))

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        return answer_by(self.head(images.embed(torch.arange(len(images)))))

    def tensors(self) -> dict[str, Tensor]:
        return {**self.parameters(), **self.extras()}

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        network = {name[4:]: t for name, t in tensors.items() if name.startswith("vit.")}
        self.backbone.vit.load_state_dict(network)
        self.head.put_back(tensors["head.weight"], tensors["head.bias"])
        self.put_back_extras(tensors)

    def bytes_per_task(self) -> list[int]:
        """Every task brings its classes' rows of the head, the first one the network and what else is kept."""
        rows = [4 * len(task) * (self.backbone.dim + 1) for task in self.tasks]
        once = 4 * self.backbone.parameters + sum(t.nbytes for t in self.extras().values())
        return [rows[0] + once, *rows[1:]] if rows else []

    def trained_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters().values())


@dataclass(frozen=True)
class RehearsalSettings(Training):
    # As CPP's Table 1 has it for 5-datasets, and the middle one of Buzzega et al. (2020). For split CIFAR-100
    # and ImageNet-R the table has 5,000.
    buffer_size: int = setting(500, at_least=1, at_most=100_000)


class Rehearsal(Network):
    """A network that keeps some images of every task and sees them again in later ones."""

    buffer = True
    settings: Any  # with `buffer_size`, but for who keeps all

    def __init__(self, backbone: Backbone, settings: Training):
        super().__init__(backbone, settings)
        self.memory = Buffer()

    def replayed(self, count: int) -> tuple[Tensor, Tensor]:
        """Images drawn from the buffer and augmented anew [at most count, 3, H, W], and their rows in it."""
        from protosteer.data.augment import Augmentation

        rows = self.memory.draw(count)
        augment = Augmentation(self.backbone.preprocessing, self.settings.augmentation)
        return augment(self.memory.pixels[rows].to(self.backbone.device)), rows

    def finish(self, task: TaskData, labels: Tensor, **notes: Tensor) -> None:
        """Every image ever seen is kept with the same probability; notes [n, ...] with the task's images."""
        kept, size = self.memory, self.settings.buffer_size
        rows = reservoir(len(kept), kept.seen, len(labels), size)
        kept.offer(task.train, labels, rows, **notes)

    def extras(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        self.memory.put_back(tensors)
