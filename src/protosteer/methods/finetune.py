"""Sequential fine-tuning, the lower bound: the whole backbone and a linear head are trained task after task.

Cross-entropy runs over all classes so far, but only this task's images are there: what was learned is
overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Lesson, Method
from protosteer.methods.toolkit import fit, numbered, seal, task_seed, unseal
from protosteer.running.progress import OnStage
from protosteer.running.resume import Bookmark
from protosteer.settings import AUGMENTATIONS, Values


@dataclass(frozen=True)
class FinetuneSettings(Values):
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 1e-4
    weight_decay: float = 1e-2
    gradient_clip: float = 5.0
    augmentation: str = "paper"
    seed: int = 0

    CHOICES: ClassVar = {"augmentation": AUGMENTATIONS}
    AT_LEAST: ClassVar = {"epochs": 1, "batch_size": 2, "learning_rate": 0, "weight_decay": 0, "seed": 0}
    ABOVE_ZERO: ClassVar = ("gradient_clip",)


class Finetune(Method):
    name = "finetune"
    settings_class = FinetuneSettings
    trains_backbone = True

    def __init__(self, backbone: Backbone, settings: FinetuneSettings):
        self.backbone = backbone.trainable_copy()
        self.settings = settings
        self.tasks = []
        self.weight = nn.Parameter(torch.empty(0, backbone.dim, device=backbone.device))  # of the head
        self.bias = nn.Parameter(torch.empty(0, device=backbone.device))

    def learn(self, task: Lesson, on_stage: OnStage | None = None, bookmark: Bookmark | None = None) -> None:
        s = self.settings
        classes, labels = numbered(task, self.classes)
        with torch.random.fork_rng():
            torch.manual_seed(task_seed(s.seed, classes))
            self._grow_head(len(classes))
            parameters = self._trained()
            optimiser = torch.optim.AdamW(parameters.values(), s.learning_rate, weight_decay=s.weight_decay)
            fit(task, labels, self.backbone, parameters, optimiser, self._loss, s, on_stage, bookmark)
        self.tasks.append(classes)

    def _grow_head(self, new: int) -> None:
        """Rows for so many more classes; those that are there stay as they are."""
        fresh = nn.Linear(self.backbone.dim, new).to(self.backbone.device)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), fresh.weight.detach()]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), fresh.bias.detach()]))

    def _trained(self) -> dict[str, nn.Parameter]:
        return {**dict(self.backbone.vit.named_parameters("vit")), "weight": self.weight, "bias": self.bias}

    def _loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self.backbone.embed(images)
        return F.cross_entropy(F.linear(embeddings, self.weight, self.bias), labels), embeddings

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        embeddings = images.embed(torch.arange(len(images)))
        logits = F.linear(embeddings, self.weight.detach().cpu(), self.bias.detach().cpu())
        return Answer(logits.argmax(dim=1))

    def state(self) -> bytes:
        return seal({"method": self.name, "tasks": self.tasks}, self._trained())

    def restore(self, state: bytes) -> None:
        header, tensors = unseal(state, "the saved state")
        self.backbone.vit.load_state_dict({n[4:]: t for n, t in tensors.items() if n.startswith("vit.")})
        self.tasks, place = header["tasks"], self.backbone.device
        self.weight, self.bias = (nn.Parameter(tensors[name].to(place)) for name in ("weight", "bias"))

    def bytes_per_task(self) -> list[int]:
        """Every task brings its classes' rows of the head, the first one the network too."""
        rows = [4 * len(task) * (self.backbone.dim + 1) for task in self.tasks]
        return [rows[0] + 4 * self.backbone.parameters, *rows[1:]] if rows else []

    def trained_parameters(self) -> int:
        return self.backbone.parameters + self.weight.numel() + self.bias.numel()
