"""Base class of methods that freeze the backbone and train prompts and a head.

An image passes the backbone twice: without a prompt, which gives its query, and with the prompt that its query
selects. The cross-entropy runs over the classes of the current task only, so the head's rows of earlier classes get no
gradient. (The papers set all other scores to minus infinity, which is the same.) A prediction is the largest of all
scores.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.methods.base import Answer, Images, Method, TrainingTask
from protosteer.methods.training_utils import (
    Head,
    TrainingJob,
    TrainingSettings,
    answer_by,
    fit,
    number_labels,
    task_cross_entropy,
    task_seed,
)


class Prompted(Method):
    """A frozen backbone, trained prompts and a head.

    A method defines what is trained (`new_shared`, `new_task_parameters`) and which prompt a query gets: `prompt` if
    the task is unknown, `training_prompt` for images of the current task.

    Attributes:
        shared: Parameters that every task trains.
        current: Parameters of the current task, while it is learned.
        past: Parameters of earlier tasks, [T, ...] by name; never trained again.
    """

    trains = "prompts, head"
    state_fields = {"shared": "once", "past": "per task", "head": "per class"}
    test_settings = {"epochs": 8, "batch_size": 8, "learning_rate": 0.02, "gradient_clip": 5.0, "augmentation": "crop"}
    settings: TrainingSettings

    def __init__(self, backbone: Backbone, settings: TrainingSettings):
        super().__init__(backbone, settings)
        self.head = Head(backbone.dim, backbone.device)
        self.shared: Mapping[str, Tensor] = {}
        self.current: dict[str, nn.Parameter] = {}
        self.past: dict[str, Tensor] = {}

    def new_shared(self) -> dict[str, Tensor]:
        """Initialise the shared parameters; called for the first task."""
        return {}

    def new_task_parameters(self) -> dict[str, Tensor]:
        """Initialise the parameters of a new task, which no later task changes."""
        return {}

    @abstractmethod
    def prompt(self, queries: Tensor) -> Prompt:
        """Return one prompt for each of B queries [B, D]."""

    def training_prompt(self, queries: Tensor) -> tuple[Prompt, Tensor]:
        """Return prompts for queries [B, D] of the current task, and a penalty to add to the loss."""
        return self.prompt(queries), queries.new_zeros(())

    def features(self, source: Backbone | Images, images: Tensor, prompt: Prompt) -> Tensor:
        """Compute what the head reads, [B, D]: of normalised images by the backbone, or of row numbers by test images."""
        return source.embed(images, prompt)

    def candidates(self, queries: Tensor) -> Tensor | None:
        """Return the tasks whose prompts queries [B, D] get, bool [B, T]; None if prompts belong to no task."""
        return None

    def learn(self, task: TrainingTask) -> None:
        """Train the shared parameters, those of the task, and the head."""
        classes, labels = number_labels(task, self.classes)
        s = self.settings
        self.generator.manual_seed(task_seed(s.seed, classes))
        shared_parameters = self._parameters(self.shared or self.new_shared())
        self.shared, self.current = shared_parameters, self._parameters(self.new_task_parameters())
        self.head.grow(len(classes), self.generator)
        parameters = {**shared_parameters, **self.current, **dict(self.head.named_parameters("head"))}
        optimiser = torch.optim.Adam(parameters.values(), s.learning_rate, weight_decay=s.weight_decay)
        fit(TrainingJob(task, task.train, labels, self.backbone, parameters, optimiser, self.loss, s, self.generator))
        self.past, self.current = {name: self.all_tasks(name).detach() for name in self.current}, {}
        self.tasks.append(classes)

    def all_tasks(self, name: str) -> Tensor:
        """Return a parameter of all tasks, [T, ...]; while a task is learned, its own comes last."""
        past = [self.past[name]] if name in self.past else []
        current = [self.current[name].unsqueeze(0)] if name in self.current else []
        return torch.cat([*past, *current])

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of normalised images [B, 3, H, W] with labels [B], and their features [B, D]."""
        prompt, penalty = self.training_prompt(self.backbone.embed(images))
        features = self.features(self.backbone, images, prompt)
        return task_cross_entropy(self.head(features), labels, len(self.classes)) + penalty, features

    @torch.no_grad()
    def answer(self, images: Images) -> Answer:
        """Predict the class of the largest score, each image under the prompt that its query selects."""
        rows = torch.arange(len(images))
        queries = images.embed(rows)
        scores = [  # in batches: each image has its own prompt, which takes memory
            self.head(self.features(images, batch, self.prompt(queries[batch].to(self.backbone.device))))
            for batch in rows.split(self.embed_batch_size)
        ]
        candidates = self.candidates(queries.to(self.backbone.device))
        fields = {} if candidates is None else {"candidates": candidates.cpu()}
        return answer_by(torch.cat(scores), prompts=torch.ones_like(rows), **fields)

    def trained_parameters(self) -> int:
        """Return the number of values in prompts and head."""
        return sum(tensor.numel() for tensor in self.state_dict().values())

    def _parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(tensor.detach().to(self.backbone.device)) for name, tensor in tensors.items()}


def draw_small(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw uniformly from 0 to 0.01, as the official code of L2P and DualPrompt initialises prompts and keys."""
    return torch.rand(shape, generator=generator) * 0.01


def similarity(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute cosines [B, K] of queries [B, D] and keys [K, D]."""
    return F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T
