"""BiC (Wu et al.): two numbers correct the bias of the last layer towards new classes.

The buffer holds few images of old classes, while the task has many of new ones, so the last layer favours the new. A
first stage trains the network on both. The loss is cross-entropy over all classes, and distillation at temperature T
over the n old classes from the network before the task; with m new classes,

    L = lambda * distillation + (1 - lambda) * cross-entropy,    lambda = n / (n + m).

A second stage freezes the network and fits alpha and beta by cross-entropy on held-out images, equally many of each
class: the new classes' logits o become alpha * o + beta. Predictions use the corrected logits. So does the teacher of
the next task, from which the next network learns them; earlier corrections are not needed (as in the authors' code).

A tenth of the buffer is held out and never trained on, in no later task either. Differences: the images to keep are
drawn, not herded. The two numbers are the minimum that L-BFGS finds, with a ridge towards (1, 0), because few images
may be separable. The authors' code uses gradient descent with a ridge on beta alone, 500 times as strong. Their network is
a ResNet that SGD trains from random weights; the optimiser here is that of `finetune`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.data.images import Chosen, ImageSet
from protosteer.methods.base import Answer, Images, Source, TrainingTask, register_method
from protosteer.methods.buffer import balanced_rows
from protosteer.methods.finetune_base import Network, Rehearsal, RehearsalSettings, distillation
from protosteer.methods.training_utils import answer_by, minimise
from protosteer.settings import setting

RIDGE = 1e-4
IDENTITY = (1.0, 0.0)  # alpha, beta of no correction


@dataclass(frozen=True)
class BiCSettings(RehearsalSettings):
    """Settings of BiC."""

    buffer_size: int = 2000  # for CIFAR-100, as FACIL quotes the paper (Sec. 6.1)
    held_out: float = setting(0.1, at_least=0, at_most=1)  # of the buffer: nb_val in the authors' code
    temperature: float = setting(2.0, above=0)  # T in the authors' code


@register_method("bic")
class BiC(Rehearsal):
    """Rehearsal with distillation and a bias correction of the new classes."""

    source = Source("Wu et al.", "Large scale incremental learning", "CVPR", 2019)
    trains = "backbone, head, 2 numbers"
    settings_class = BiCSettings
    published = {**Rehearsal.published, "imagenet-subset": {"epochs": 100}}
    published_source = (
        "CPP's Table 1 (buffers); imagenet_main.py of the authors' code (ImageNet-subset, 20 images per class)"
    )
    state_fields = {**Rehearsal.state_fields, "correction": "once"}
    test_settings = {**Network.test_settings, "buffer_size": 24}
    distils = True
    settings: BiCSettings

    def __init__(self, backbone: Backbone, settings: BiCSettings):
        super().__init__(backbone, settings)
        self.correction = torch.tensor(IDENTITY)  # alpha and beta of the latest task's classes
        # True for the held-out images of the current task, bool [n].
        self.held = torch.empty(0, dtype=torch.bool)

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Draw the held-out images."""
        super().begin_task(task, labels)
        classes = len(self.classes) + len(labels.unique())
        s = self.settings
        self.held = draw_held_out(labels, s.held_out, s.buffer_size // classes, self.generator)

    def training_set(self, images: ImageSet, labels: Tensor) -> tuple[ImageSet, Tensor]:
        """Return buffer and task without the held-out images."""
        all_images, targets = self.buffer.joined_with(images, labels)
        rows = (~self.held_out_mask()).nonzero()[:, 0]
        return Chosen(all_images, rows.tolist()), targets[rows]

    def held_out_mask(self) -> Tensor:
        """Return a mask of the held-out images of buffer and task, bool [n]."""
        return torch.cat([self.buffer.notes.get("held", self.held[:0]), self.held])

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cross-entropy and distillation; see `Network.loss`."""
        embeddings = self.backbone.embed(images)
        logits = self.head(embeddings)
        loss = F.cross_entropy(logits, labels)
        if self.teacher:
            targets = correct(self.teacher(images), self.correction, len(self.tasks[-1]))
            count = targets.shape[1]
            share = count / logits.shape[1]
            distillation_loss = distillation(logits[:, :count], targets, self.settings.temperature)
            loss = share * distillation_loss + (1 - share) * loss
        return loss, embeddings

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Fit the correction and update the buffer."""
        all_images, targets = self.buffer.joined_with(task.train, labels)
        held, new_count = self.held_out_mask(), len(self.tasks[-1])
        if len(self.tasks) > 1:
            self.correction = self.fit_correction(all_images, targets, held.nonzero()[:, 0], new_count)
        rows = rows_to_keep(targets, held, self.settings.held_out, self.settings.buffer_size, self.generator)
        self.buffer.offer(task.train, labels, rows, held=self.held)

    def fit_correction(self, images: ImageSet, labels: Tensor, rows: Tensor, new_count: int) -> Tensor:
        """Fit alpha and beta, [2], on held-out rows of buffer and task, equally many of each class."""
        per_class = int(labels[rows].bincount(minlength=len(self.classes)).min())
        rows = rows[balanced_rows(labels[rows], per_class * len(self.classes))]
        if not len(rows):  # the buffer is too small to hold out an image of every class
            return torch.tensor(IDENTITY)
        embeddings = self.backbone.embed_set(images, batch_size=self.settings.embed_batch_size, rows=rows.tolist())
        return fit_bias(self.head(embeddings).detach().cpu(), labels[rows], new_count)

    def answer(self, images: Images) -> Answer:
        """Predict the class of the largest corrected logit."""
        logits = self.logits(images.embed(torch.arange(len(images))))
        return answer_by(correct(logits, self.correction, len(self.tasks[-1])))


def correct(logits: Tensor, correction: Tensor, new_count: int) -> Tensor:
    """Return logits [B, K] with the last `new_count` of them as alpha * o + beta."""
    alpha, beta = correction.to(logits.device)
    return torch.cat([logits[:, :-new_count], alpha * logits[:, -new_count:] + beta], dim=1)


def fit_bias(logits: Tensor, labels: Tensor, new_count: int) -> Tensor:
    """Return the alpha and beta, [2], that minimise the cross-entropy of logits [B, K] and labels [B]."""
    start = torch.tensor(IDENTITY)
    numbers = start.clone().requires_grad_()

    def loss() -> Tensor:
        return F.cross_entropy(correct(logits, numbers, new_count), labels) + RIDGE * ((numbers - start) ** 2).sum()

    minimise(loss, [numbers])
    return numbers.detach()


def draw_held_out(labels: Tensor, share: float, quota: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw the images of labels [n] to hold out, bool [n].

    Each class gives a share of the `quota` that the buffer will hold: at least one image, at most half of the class.
    """
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        class_rows = (labels == label).nonzero()[:, 0]
        count = min(max(1, int(share * min(quota, len(class_rows)))), len(class_rows) // 2)
        held[class_rows[torch.randperm(len(class_rows), generator=generator)[:count]]] = True
    return held


def rows_to_keep(
    labels: Tensor, held: Tensor, share: float, size: int, generator: torch.Generator | None = None
) -> Tensor:
    """Choose rows of labels [n] for a buffer of `size`, balanced among held-out images, bool [n], and among the others.

    Held-out images get a share of the buffer, or one place per class. The others are drawn.
    """
    held_size = min(max(int(share * size), len(labels.unique())), size // 2)
    held_rows, other_rows = held.nonzero()[:, 0], (~held).nonzero()[:, 0]
    held_rows = held_rows[balanced_rows(labels[held_rows], held_size)]
    # Drawn by their order: `balanced_rows` chooses the first rows of each class.
    other_rows = other_rows[torch.randperm(len(other_rows), generator=generator)]
    return torch.cat([held_rows, other_rows[balanced_rows(labels[other_rows], size - len(held_rows))]])
