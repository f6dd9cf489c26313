"""EASE (Zhou et al., CVPR 2024): an adapter per task, and all of them vote.

Each task trains adapters beside the MLPs of the frozen backbone, by cross-entropy over its own classes under
a head that is thrown away. So there are as many spaces as tasks; f_s(x) is an image as the adapters of task s
show it. p_s(k) is class k in space s: the mean of its images where they could be seen, which is in the spaces
of its own task and of those before it.

In the space s of a later task a class k of task t is made up of the classes C that came with s and since. How
much of each it gets is told by what they look like in space t, where all of them were seen:

    p_s(k) = sum over c in C of w(c) p_s(c),   w = softmax over C of cos(p_t(k), p_t(c))

The score of class k of task t is cos(f_t(x), p_t(k)) + alpha / (T - 1) times the sum of cos(f_s(x), p_s(k))
over all other spaces s, and the highest wins.

As in the authors' code, C is renewed with every task (the paper's C are the classes of task s alone), and
alpha is shared among the other spaces (the paper's counts in full for each). Unlike there, an adapter reads
what its MLP reads, tokens after the norm, and has no dropout; gradients are clipped, and images are augmented
as for every other method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.adapters import new_adapters, with_adapters
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.per_task_tuning import CosineHead, train_alone
from protosteer.methods.training_utils import Training, class_means, embedded, numbered, task_seed
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import setting


@dataclass(frozen=True)
class EASESettings(Training):
    """Those of the authors' code for CIFAR-100 (exps/ease_cifar.json, utils/inc_net.py)."""

    epochs: int = 20
    batch_size: int = 48
    learning_rate: float = 0.025
    schedule: str = "cosine"
    weight_decay: float = 5e-4
    adapter_width: int = setting(64, at_least=1, at_most=2**16)
    adapter_scale: float = 0.1
    alpha: float = setting(0.1, at_least=0)  # what all other spaces together weigh beside a class's own


class EASE(Method):
    name = "ease"
    source = Source(
        "Zhou et al.",
        "Expandable subspace ensemble for pre-trained model-based class-incremental learning",
        "CVPR",
        2024,
    )
    trains = "adapters per task"
    settings_class = EASESettings

    def __init__(self, backbone: Backbone, settings: EASESettings):
        super().__init__(backbone, settings)
        self.adapters = nn.ModuleList()  # of every task: one per layer
        self.adapted: list[Backbone] = []  # with each task's
        self.prototypes = torch.empty(0, 0, backbone.dim)  # [T, K, D]: in each space, each class

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        s, classes = self.settings, numbered(task, [])[0]
        with torch.random.fork_rng():
            torch.manual_seed(task_seed(s.seed, classes))
            adapters = new_adapters(self.backbone, s.adapter_width)
            head = CosineHead(self.backbone.dim, len(classes), self.backbone.device)
            learning = with_adapters(self.backbone, adapters, s.adapter_scale, trainable=True)
            parameters = dict(adapters.named_parameters())
            train_alone(task, learning, parameters, learning.embed, head, s, on_stage, checkpoint)
        self.add(adapters)
        self.tasks.append(classes)
        self.see(task, on_stage)

    def add(self, adapters: nn.ModuleList) -> None:
        """A new space."""
        self.adapters.append(adapters)
        adapted = with_adapters(self.backbone, adapters, self.settings.adapter_scale, trainable=False)
        self.adapted.append(adapted)

    def see(self, task: TaskData, on_stage: OnStage | None) -> None:
        """Prototypes of the newest task's classes in all spaces, and of earlier ones in its own."""
        labels = numbered(task, [])[1]
        new = torch.stack(
            [
                class_means(embedded(task, space, self.embed_batch_size, on_stage, "prototypes"), labels)
                for space in self.adapted
            ]
        )
        old = F.pad(self.prototypes, (0, 0, 0, 0, 0, 1))  # a space more, which `complemented` fills
        self.prototypes = complemented(torch.cat([old, new], dim=1), [len(names) for names in self.tasks])

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        rows = torch.arange(len(images))
        seen = [images.embed(rows, key=f"adapter {t}", backbone=b) for t, b in enumerate(self.adapted)]
        found = scores(torch.stack(seen), self.prototypes, [len(t) for t in self.tasks], self.settings.alpha)
        passes = torch.full((len(images),), len(self.tasks) - 1)  # the plain backbone is not asked
        return Answer(found.argmax(dim=1), prompts=passes)

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"adapters.{name}": tensor for name, tensor in self.adapters.state_dict().items()}
        return {"prototypes": self.prototypes, **weights}

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        self.prototypes = tensors["prototypes"]
        self.adapters, self.adapted = nn.ModuleList(), []
        for t in range(len(self.tasks)):
            prefix, adapters = f"adapters.{t}.", new_adapters(self.backbone, self.settings.adapter_width)
            adapters.load_state_dict(
                {name.removeprefix(prefix): w for name, w in tensors.items() if name.startswith(prefix)}
            )
            self.add(adapters)

    def bytes_per_task(self) -> list[int]:
        """Adapters, its classes in all spaces so far, and all earlier classes in its own."""
        counts, known, added = [len(task) for task in self.tasks], 0, []
        for t, (count, adapters) in enumerate(zip(counts, self.adapters, strict=True)):
            numbers = ((t + 1) * count + known) * self.backbone.dim
            added.append(4 * (numbers + sum(p.numel() for p in adapters.parameters())))
            known += count
        return added

    def trained_parameters(self) -> int:
        """Adapters, and the heads that were thrown away."""
        heads = len(self.classes) * self.backbone.dim + len(self.tasks)
        return heads + sum(p.numel() for p in self.adapters.parameters())


def complemented(prototypes: Tensor, counts: Sequence[int]) -> Tensor:
    """Prototypes [T, K, D] in which every class that was not seen in a space is made up of those that were.

    counts: how many classes each task has.
    """
    prototypes, first = prototypes.clone(), [sum(counts[:t]) for t in range(len(counts))]
    for t, count in enumerate(counts):
        own = slice(first[t], first[t] + count)
        for s in range(t + 1, len(counts)):
            cosine = F.normalize(prototypes[t, own], dim=1) @ F.normalize(prototypes[t, first[s] :], dim=1).T
            prototypes[s, own] = cosine.softmax(dim=1) @ prototypes[s, first[s] :]
    return prototypes


def scores(seen: Tensor, prototypes: Tensor, counts: Sequence[int], alpha: float) -> Tensor:
    """[B, K] from images in all spaces [T, B, D] and classes in all spaces [T, K, D]."""
    cosine = F.normalize(seen, dim=2) @ F.normalize(prototypes, dim=2).mT  # [T, B, K]
    task_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    own = F.one_hot(task_of, len(counts)).T  # [T, K]
    weights = own + (1 - own) * alpha / max(1, len(counts) - 1)
    return (weights[:, None] * cosine).sum(dim=0)
