"""BiC (Wu et al.): two numbers undo the advantage that a new task's classes have over the old ones.

Of old classes a buffer keeps few images, of new ones there are many, so that the last layer comes to favour the new.
In a first stage the network is trained on both, with cross-entropy over all classes and distillation, at
temperature T, over the n old classes from the network before the task; with m new ones,

    L = lambda * distillation + (1 - lambda) * cross-entropy,    lambda = n / (n + m).

In a second stage all of that is frozen, and on images that were held out of training, equally many of each class,
alpha and beta are fitted by cross-entropy, by which the new classes' logits o become alpha * o + beta. So they are
when images are predicted, and when the network is the next task's teacher, from which the next network learns it:
the numbers of earlier tasks are not needed any more (as in the authors' code).

A tenth of the buffer is what was held out, which is never trained on, in no later task either. Differences: which
images are kept is drawn, not herded; the two numbers are the minimum that L-BFGS finds, not the end of a descent,
and since few images may be told apart perfectly, a ridge holds them near (1, 0). The authors' code has a ridge on
beta alone, 500 times as strong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import Chosen, ImageSet
from protosteer.methods.base import Answer, Images, Source, TaskData
from protosteer.methods.buffer import balanced
from protosteer.methods.distillation import Teacher, distillation
from protosteer.methods.finetune_base import Rehearsal, RehearsalSettings
from protosteer.methods.training_utils import answer_by, minimise
from protosteer.settings import setting

RIDGE = 1e-4
UNCHANGED = (1.0, 0.0)  # alpha, beta


@dataclass(frozen=True)
class BiCSettings(RehearsalSettings):
    buffer_size: int = 2000  # for CIFAR-100, as FACIL quotes the paper (Sec. 6.1)
    held_out: float = setting(0.1, at_least=0, at_most=1)  # of the buffer: nb_val in the authors' code
    temperature: float = setting(2.0, above=0)  # T in the authors' code


class BiC(Rehearsal):
    name = "bic"
    source = Source("Wu et al.", "Large scale incremental learning", "CVPR", 2019)
    settings_class = BiCSettings
    settings: BiCSettings
    trains = "backbone, head, 2 numbers"
    teacher: Teacher | None = None  # none in the first task

    def __init__(self, backbone: Backbone, settings: BiCSettings):
        super().__init__(backbone, settings)
        self.correction = torch.tensor(UNCHANGED)  # of the latest task's classes
        self.held = torch.empty(0, dtype=torch.bool)  # what the task under way does not train on

    def prepare(self, task: TaskData, labels: Tensor) -> None:
        self.teacher = Teacher(self.backbone, self.head) if self.tasks else None
        classes = len(self.classes) + len(labels.unique())
        self.held = held_out(labels, self.settings.held_out, self.settings.buffer_size // classes)

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        both, targets = self.memory.before(images, labels)
        rows = (~self.all_held()).nonzero()[:, 0]
        return Chosen(both, rows.tolist()), targets[rows]

    def all_held(self) -> Tensor:
        """Of the buffer and, after it, the task's images: which are held out. bool [n]."""
        return torch.cat([self.memory.notes.get("held", self.held[:0]), self.held])

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self.backbone.embed(images)
        logits = self.head(embeddings)
        loss = F.cross_entropy(logits, labels)
        if self.teacher:
            wanted = corrected(self.teacher(images), self.correction, len(self.tasks[-1]))
            old = wanted.shape[1]
            share = old / logits.shape[1]
            kept = distillation(logits[:, :old], wanted, self.settings.temperature)
            loss = share * kept + (1 - share) * loss
        return loss, embeddings

    def finish(self, task: TaskData, labels: Tensor, **notes: Tensor) -> None:
        both, targets = self.memory.before(task.train, labels)
        held, new = self.all_held(), len(self.tasks[-1])
        if self.teacher:
            self.correction = self.estimate(both, targets, held.nonzero()[:, 0], new)
        rows = keepers(targets, held, self.settings.held_out, self.settings.buffer_size)
        self.memory.offer(task.train, labels, rows, held=self.held)
        self.teacher = None

    def estimate(self, images: ImageSet, labels: Tensor, rows: Tensor, new: int) -> Tensor:
        """alpha and beta by the images of some rows, of each class as many as there are of every class."""
        each = int(labels[rows].bincount(minlength=len(self.classes)).min())
        rows = rows[balanced(labels[rows], each * len(self.classes))]
        if not len(rows):  # the buffer is too small to hold something out of every class
            return torch.tensor(UNCHANGED)
        embeddings = self.backbone.embed_set(
            images, batch_size=self.settings.embed_batch_size, rows=rows.tolist()
        )
        return bias(self.head(embeddings).detach().cpu(), labels[rows], new)

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        logits = self.head(images.embed(torch.arange(len(images))))
        return answer_by(corrected(logits, self.correction, len(self.tasks[-1])))

    def extras(self) -> dict[str, Tensor]:
        return {"correction": self.correction, **super().extras()}

    def put_back_extras(self, tensors: Mapping[str, Tensor]) -> None:
        self.correction = tensors["correction"]
        super().put_back_extras(tensors)


def corrected(logits: Tensor, correction: Tensor, new: int) -> Tensor:
    """Logits [B, K], the last `new` of them as alpha * o + beta."""
    alpha, beta = correction.to(logits.device)
    return torch.cat([logits[:, :-new], alpha * logits[:, -new:] + beta], dim=1)


def bias(logits: Tensor, labels: Tensor, new: int) -> Tensor:
    """alpha and beta that explain the labels best."""
    start = torch.tensor(UNCHANGED)
    numbers = start.clone().requires_grad_()
    minimise(
        lambda: (
            F.cross_entropy(corrected(logits, numbers, new), labels) + RIDGE * ((numbers - start) ** 2).sum()
        ),
        [numbers],
    )
    return numbers.detach()


def held_out(labels: Tensor, share: float, quota: int) -> Tensor:
    """bool [n]: of each class a share of what the buffer will have room for, `quota`, at least one image.

    Half of a class at most, so that it can be learned. Draws from torch's generator.
    """
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        own = (labels == label).nonzero()[:, 0]
        count = min(max(1, int(share * min(quota, len(own)))), len(own) // 2)
        held[own[torch.randperm(len(own))[:count]]] = True
    return held


def keepers(labels: Tensor, held: Tensor, share: float, size: int) -> Tensor:
    """Rows that a buffer keeps: balanced among those held out, which get a share of it or one place per class, and
    balanced among the others, which get the rest.
    """
    room = min(max(int(share * size), len(labels.unique())), size // 2)
    aside, others = held.nonzero()[:, 0], (~held).nonzero()[:, 0]
    aside = aside[balanced(labels[aside], room)]
    others = others[torch.randperm(len(others))]  # of each class, those that come first are kept
    return torch.cat([aside, others[balanced(labels[others], size - len(aside))]])
