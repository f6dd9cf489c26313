"""Methods that leave the backbone as it is and train prompts and a head: all but what makes each of them
special.

An image is seen twice: plainly, which gives its query, and under the prompt that its query asks for. The
cross-entropy runs over the classes of the task under way alone (the papers set the scores of all others to minus
infinity, which is the same), so that the head's rows of earlier classes get no gradient; an answer is the
largest of all scores. A task of one class would learn nothing so: there, and only there, all classes count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.methods.base import Answer, Images, Method, TaskData
from protosteer.methods.training_utils import Head, Training, answer_by, fit, numbered, task_seed
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage


class Prompted(Method):
    """A method says what it trains (`new_shared`, `new_own`) and which prompt a query gets.

    `prompt` is for images whose task is unknown, `training_prompt` for those of the task under way.
    """

    trains = "prompts, head"
    settings: Training

    def __init__(self, backbone: Backbone, settings: Training):
        super().__init__(backbone, settings)
        self.head = Head(backbone.dim, backbone.device)
        self.shared: dict[str, nn.Parameter] = {}  # trained by every task
        self.own: dict[str, nn.Parameter] = {}  # of the task under way
        self.kept: dict[str, Tensor] = {}  # [T, ...]: what was each task's own, never trained again

    def new_shared(self) -> dict[str, Tensor]:
        """What the first task begins with and every later one goes on with."""
        return {}

    def new_own(self) -> dict[str, Tensor]:
        """What a new task begins with and no later one changes."""
        return {}

    @abstractmethod
    def prompt(self, queries: Tensor) -> Prompt:
        """One for each of B queries [B, D]."""

    def training_prompt(self, queries: Tensor) -> tuple[Prompt, Tensor]:
        """The same for images of the task under way, and what is added to their loss."""
        return self.prompt(queries), queries.new_zeros(())

    def features(self, by: Backbone | Images, images: Tensor, prompt: Prompt) -> Tensor:
        """What the head sees, [B, D]: of images by the backbone, or of row numbers by test images."""
        return by.embed(images, prompt)

    def candidates(self, queries: Tensor) -> Tensor | None:
        """bool [B, T]: the tasks whose prompts the queries get, where prompts belong to tasks."""
        return None

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        classes, labels = numbered(task, self.classes)
        s = self.settings
        with torch.random.fork_rng():
            torch.manual_seed(task_seed(s.seed, classes))
            self.shared = self.shared or self._parameters(self.new_shared())
            self.own = self._parameters(self.new_own())
            self.head.grow(len(classes))
            trained = {**self.shared, **self.own, **dict(self.head.named_parameters("head"))}
            optimiser = torch.optim.Adam(trained.values(), s.learning_rate, weight_decay=s.weight_decay)
            fit(
                task.name,
                task.train,
                labels,
                self.backbone,
                trained,
                optimiser,
                self.loss,
                s,
                on_stage,
                checkpoint,
            )
        self.kept, self.own = {name: self.whole(name).detach() for name in self.own}, {}
        self.tasks.append(classes)

    def whole(self, name: str) -> Tensor:
        """[T, ...]: what is each task's own; amid training, that of the task under way is the last."""
        earlier = [self.kept[name]] if name in self.kept else []
        new = [self.own[name].unsqueeze(0)] if name in self.own else []
        return torch.cat([*earlier, *new])

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        prompt, penalty = self.training_prompt(self.backbone.embed(images))
        features = self.features(self.backbone, images, prompt)
        return self.cross_entropy(self.head(features), labels) + penalty, features

    def cross_entropy(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Over the new classes; a single one has no other to be told from, so there all classes count."""
        known = len(self.classes)
        first = known if scores.shape[1] > known + 1 else 0
        return F.cross_entropy(scores[:, first:], labels - first)

    @torch.no_grad()
    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        rows = torch.arange(len(images))
        queries = images.embed(rows)
        scores = [  # in parts: every image has a prompt of its own, which takes memory
            self.head(self.features(images, some, self.prompt(queries[some].to(self.backbone.device))))
            for some in rows.split(self.embed_batch_size)
        ]
        candidates = self.candidates(queries.to(self.backbone.device))
        retrieved = {} if candidates is None else {"candidates": candidates.cpu()}
        return answer_by(torch.cat(scores), prompts=torch.ones_like(rows), **retrieved)

    def tensors(self) -> dict[str, Tensor]:
        shared = {f"shared.{name}": tensor for name, tensor in self.shared.items()}
        kept = {f"kept.{name}": tensor for name, tensor in self.kept.items()}
        every = {**shared, **kept, **dict(self.head.named_parameters("head"))}
        return {name: tensor.detach().cpu() for name, tensor in every.items()}

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        under: dict[str, dict[str, Tensor]] = {"shared": {}, "kept": {}, "head": {}}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            under[kind][rest] = tensor.to(self.backbone.device)
        self.shared, self.kept = self._parameters(under["shared"]), under["kept"]
        self.head.put_back(under["head"]["weight"], under["head"]["bias"])

    def bytes_per_task(self) -> list[int]:
        """Every task brings its classes' rows of the head and what is its own, the first one what is shared."""
        own = sum(tensor[0].nbytes for tensor in self.kept.values())
        each = [4 * len(task) * (self.backbone.dim + 1) + own for task in self.tasks]
        return [each[0] + sum(t.nbytes for t in self.shared.values()), *each[1:]] if each else []

    def trained_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors().values())

    def _parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(tensor.to(self.backbone.device)) for name, tensor in tensors.items()}


def small(*shape: int) -> Tensor:
    """Uniform in 0 to 0.01, as the official code of L2P and DualPrompt draws prompts and keys."""
    return torch.rand(shape) * 0.01


def similarity(queries: Tensor, keys: Tensor) -> Tensor:
    """Cosines [B, K] of queries [B, D] and keys [K, D]."""
    return F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T
