"""S-Prompts, for images alone (Wang et al., NeurIPS 2022): independent prompts, one per task.

Each task trains its own shallow prompt and linear head, by cross-entropy over its own classes. It also stores the
K-means centroids of its images' plain embeddings, scaled to unit length. The nearest centroid decides an image's task;
that task's prompt and head predict the class.

The paper is about the same classes in new domains, where a wrong domain may still give the right class: streams such as
`domains:PATH`. With new classes in each task, a wrong task is a wrong answer. As in the authors' code, the nearest
centroid is by the sum of absolute differences, although K-means is Euclidean. Differences: centroids are those of plain
images, not augmented ones; the weight decay of the first task, there 5e-4, is that of later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TrainingTask, register_method
from protosteer.methods.per_task_tuning import PromptTraining, tune_prompt
from protosteer.methods.training_utils import answer_by, embed_task, number_labels, task_seed
from protosteer.paper.prototypes import centroids
from protosteer.settings import setting
from protosteer.util.seeded import seeded


@dataclass(frozen=True)
class SPromptsSettings(PromptTraining):
    """Settings of S-Prompts.

    Defaults are those of the authors' code for DomainNet (configs/domainnet_slip.json, methods/sprompt.py).
    """

    epochs: int = 30
    batch_size: int = 128
    learning_rate: float = 0.01
    weight_decay: float = 2e-4
    prompt_length: int = 10
    centroids: int = setting(5, at_least=1, at_most=10_000)  # per task


@register_method("s-prompts")
class SPrompts(Method):
    """A prompt and a head per task, chosen by the nearest centroid."""

    source = Source(
        "Wang et al.",
        "S-Prompts learning with pre-trained transformers: an Occam's razor for domain incremental learning",
        "NeurIPS",
        2022,
    )
    grid = {"learning_rate": (0.01, 3e-3, 0.03)}
    trains = "a prompt and a head per task"
    settings_class = SPromptsSettings
    supports_repeated_classes = True
    state_fields = {
        "prompts": "per task", "weight": "once", "bias": "once", "heads": "once", "centroids": "once", "owners": "once",
    }  # fmt: skip
    test_settings = {"epochs": 8, "batch_size": 8, "prompt_length": 2, "learning_rate": 0.06, "augmentation": "crop"}

    def __init__(self, backbone: Backbone, settings: SPromptsSettings):
        super().__init__(backbone, settings)
        dim, self.shape = backbone.dim, backbone.prompt_shape(settings.prompt_length, deep=False)
        self.prompts = torch.empty(0, *self.shape)  # [T, 1, L, D]
        self.weight, self.bias = torch.empty(0, dim), torch.empty(0)  # of all heads, one after the other, [K, D], [K]
        self.heads = torch.empty(0, 2, dtype=torch.long)  # task and class of each of their rows, int64 [K, 2]
        self.centroids = torch.empty(0, dim)  # of all tasks, [C, D]
        self.owners = torch.empty(0, dtype=torch.long)  # the task of each centroid, int64 [C]

    def learn(self, task: TrainingTask) -> None:
        """Train the task's prompt and head, and compute its centroids."""
        s, dim, device = self.settings, self.backbone.dim, self.backbone.device
        classes, new_classes = number_labels(task, [])[0], number_labels(task, self.classes)[0]
        seed = task_seed(s.seed, classes)
        self.generator.manual_seed(seed)
        start = seeded(lambda: nn.Linear(dim, s.prompt_length), self.generator).weight.detach().view(self.shape)
        head = seeded(lambda: nn.Linear(dim, len(classes)), self.generator).to(device)
        prompt = tune_prompt(task, self.backbone, start, head, s, self.generator)
        embeddings = embed_task(task, self.backbone, self.embed_batch_size)
        means = centroids(F.normalize(embeddings, dim=1), s.centroids, "kmeans", seed=seed % 2**32).means
        self.prompts = torch.cat([self.prompts, prompt[None]])
        self.weight = torch.cat([self.weight, head.weight.detach().cpu()])
        self.bias = torch.cat([self.bias, head.bias.detach().cpu()])
        self.centroids = torch.cat([self.centroids, means])
        self.owners = torch.cat([self.owners, torch.full((len(means),), len(self.tasks))])
        number = {name: k for k, name in enumerate([*self.classes, *new_classes])}
        rows = torch.tensor([[len(self.tasks), number[name]] for name in classes])
        self.heads = torch.cat([self.heads, rows])
        self.tasks.append(new_classes)

    def answer(self, images: Images) -> Answer:
        """Predict by the prompt and head of the task with the nearest centroid."""
        queries = F.normalize(images.embed(torch.arange(len(images))), dim=1)
        task_numbers = self.owners[torch.cdist(queries, self.centroids, p=1).argmin(dim=1)]  # [B]
        logits = torch.full((len(images), len(self.classes)), -torch.inf)
        for t in task_numbers.unique().tolist():
            rows, mask = (task_numbers == t).nonzero()[:, 0], self.heads[:, 0] == t
            features = images.embed(rows, self.prompts[t], f"task {t}")
            logits[rows[:, None], self.heads[mask, 1]] = F.linear(features, self.weight[mask], self.bias[mask])
        candidates = F.one_hot(task_numbers, len(self.tasks)).bool()
        return answer_by(logits, candidates=candidates, prompts=torch.ones_like(task_numbers))

    def bytes_per_task(self) -> list[int]:
        """Return the bytes of a task's prompt, head and centroids."""
        heads, centroids = (owners.bincount(minlength=len(self.tasks)) for owners in (self.heads[:, 0], self.owners))
        row, prompt = 4 * self.backbone.dim, 4 * torch.Size(self.shape).numel()
        return (prompt + heads * (row + 20) + centroids * (row + 8)).tolist()

    def trained_parameters(self) -> int:
        """Return the size of prompts and heads."""
        return self.prompts.numel() + self.weight.numel() + self.bias.numel()
