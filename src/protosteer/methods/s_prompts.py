"""S-Prompts, for images alone (Wang et al., NeurIPS 2022): tasks know nothing of each other.

Each task trains a shallow prompt and a linear head of its own, by cross-entropy over its own classes. It also
keeps the centroids of K-means over the plain embeddings of its images, each scaled to length one. The
centroid nearest to an image says which task it is taken to belong to; that task's prompt and head say the
class.

The paper is about the same classes in new domains, where the class counts and the domain does not. With new
classes in each task, as here, a wrong task is a wrong answer. As in the authors' code, the nearest is by the
sum of absolute differences, although K-means is Euclidean. Unlike there, centroids are those of images as
they are, not augmented; gradients are clipped, and images are augmented as for every other method here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.per_task_tuning import PromptTraining, train_prompt
from protosteer.methods.training_utils import answer_by, embedded, numbered, task_seed
from protosteer.paper.prototypes import centroids
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import setting


@dataclass(frozen=True)
class SPromptsSettings(PromptTraining):
    """Those of the authors' code for DomainNet (configs/domainnet_slip.json, methods/sprompt.py)."""

    epochs: int = 30
    batch_size: int = 128
    learning_rate: float = 0.01
    weight_decay: float = 2e-4
    prompt_length: int = 10
    centroids: int = setting(5, at_least=1, at_most=10_000)  # per task


class SPrompts(Method):
    name = "s-prompts"
    source = Source(
        "Wang et al.",
        "S-Prompts learning with pre-trained transformers: an Occam's razor for domain incremental learning",
        "NeurIPS",
        2022,
    )
    trains = "a prompt and a head per task"
    settings_class = SPromptsSettings

    def __init__(self, backbone: Backbone, settings: SPromptsSettings):
        super().__init__(backbone, settings)
        dim, self.shape = backbone.dim, backbone.prompt_shape(settings.prompt_length, deep=False)
        self.prompts = torch.empty(0, *self.shape)  # [T, 1, L, D]
        self.weight, self.bias = (
            torch.empty(0, dim),
            torch.empty(0),
        )  # [K, D], [K]: the heads, one after another
        self.centroids = torch.empty(0, dim)  # [C, D]: of all tasks
        self.owners = torch.empty(0, dtype=torch.long)  # [C]: the task of each

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        s, dim, device = self.settings, self.backbone.dim, self.backbone.device
        classes = numbered(task, [])[0]
        seed = task_seed(s.seed, classes)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            start = nn.Linear(dim, s.prompt_length).weight.detach().view(self.shape)  # small random numbers
            head = nn.Linear(dim, len(classes)).to(device)
            prompt = train_prompt(task, self.backbone, start, head, s, on_stage, checkpoint)
        plain = embedded(task, self.backbone, self.embed_batch_size, on_stage)
        means = centroids(F.normalize(plain, dim=1), s.centroids, "kmeans", seed=seed % 2**32).means
        self.prompts = torch.cat([self.prompts, prompt[None]])
        self.weight = torch.cat([self.weight, head.weight.detach().cpu()])
        self.bias = torch.cat([self.bias, head.bias.detach().cpu()])
        self.centroids = torch.cat([self.centroids, means])
        self.owners = torch.cat([self.owners, torch.full((len(means),), len(self.tasks))])
        self.tasks.append(classes)

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        plain = F.normalize(images.embed(torch.arange(len(images))), dim=1)
        chosen = self.owners[torch.cdist(plain, self.centroids, p=1).argmin(dim=1)]  # [B]
        logits = torch.full((len(images), len(self.classes)), -torch.inf)
        first = 0
        for t, names in enumerate(self.tasks):
            rows, own = (chosen == t).nonzero()[:, 0], slice(first, first + len(names))
            if len(rows):
                prompted = images.embed(rows, self.prompts[t], f"task {t}")
                logits[rows, own] = F.linear(prompted, self.weight[own], self.bias[own])
            first = own.stop
        candidates = F.one_hot(chosen, len(self.tasks)).bool()
        return answer_by(logits, candidates=candidates, prompts=torch.ones_like(chosen))

    def tensors(self) -> dict[str, Tensor]:
        kept = ("prompts", "weight", "bias", "centroids", "owners")
        return {name: getattr(self, name) for name in kept}

    def bytes_per_task(self) -> list[int]:
        each = self.owners.bincount(minlength=len(self.tasks)).tolist()
        one, prompt = 4 * self.backbone.dim, 4 * torch.Size(self.shape).numel()
        return [
            prompt + len(task) * (one + 4) + count * (one + 8)
            for task, count in zip(self.tasks, each, strict=True)
        ]

    def trained_parameters(self) -> int:
        return self.prompts.numel() + self.weight.numel() + self.bias.numel()
