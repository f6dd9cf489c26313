"""InfLoRA (Liang and Li, CVPR 2024): low-rank updates that do not interfere with earlier tasks.

In every layer, the key and value projections W get a low-rank update per task, W + B A. A [r, D] is fixed before
training. B is trained, beside the task's rows of a linear head. Cross-entropy runs over the task's own classes,
over all if it has only one. After the task, B A is added to W. A prediction is the largest of all logits.

B A changes outputs only for inputs that A reads. So the rows of A are directions in which the task's inputs lie and
those of earlier tasks do not. C is the mean of x x^T over the task's tokens, and P the projection on the directions that
earlier tasks need. The rows of A are the first r left singular vectors of (I - P) C, over sqrt(3).

After training, P grows. C is computed by the trained network, and s are the singular values of (I - P) C. Directions are
added until those in P have a share epsilon of C's energy, sum s^2. epsilon rises with the tasks, from `energy` to 1 at
`expected_tasks`.

This follows the authors' code. There, P or its complement is stored, whichever is smaller; the computation is the same,
and here P is stored as a matrix of fixed size. Differences: C is computed with the evaluation transform, not on augmented
images, and the rate falls to zero by half a cosine at every step; there, by a quarter cosine every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protosteer.backbones import Backbone
from protosteer.methods.base import Source, TrainingTask, register_method
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import TrainingSettings, embed_task, task_cross_entropy
from protosteer.paper.vit import Attention
from protosteer.settings import setting


@dataclass(frozen=True)
class InfLoRASettings(TrainingSettings):
    """Settings of InfLoRA; defaults are the authors' for CIFAR-100 (configs/cifar100_inflora.json)."""

    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 5e-4
    schedule: str = "cosine"
    weight_decay: float = 0.0
    rank: int = setting(10, at_least=1, at_most=10_000)
    energy: float = setting(0.95, at_least=0, at_most=1)  # epsilon of the first task
    expected_tasks: int = setting(10, at_least=1)


class LowRankQKV(nn.Linear):
    """A joint q, k, v projection whose k and v have a low-rank update; shares its weights with the plain one."""

    def __init__(self, linear: nn.Linear, down: Tensor):
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self.down = down  # A [r, D]
        self.up = nn.Parameter(down.new_zeros(2 * down.shape[1], len(down)))  # B of k, then of v, [2 D, r]

    def forward(self, x: Tensor) -> Tensor:
        """Project tokens [B, N, D] to [B, N, 3 D]."""
        update = F.linear(F.linear(x, self.down), self.up)
        return super().forward(x) + F.pad(update, (x.shape[-1], 0))

    def to_plain(self) -> nn.Linear:
        """Return a plain projection that computes the same."""
        linear = nn.Linear(self.down.shape[1], len(self.weight), bias=self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        with torch.no_grad():
            linear.weight[self.down.shape[1] :] += self.up @ self.down
        return linear


@register_method("inflora")
class InfLoRA(Network):
    """Low-rank updates of keys and values, in directions that earlier tasks do not need."""

    source = Source(
        "Liang and Li", "InfLoRA: interference-free low-rank adaptation for continual learning", "CVPR", 2024
    )
    trains = "low-rank updates of keys and values per task, head"
    settings_class = InfLoRASettings
    published = {"split-cifar100": {}, "imagenet-r": {"epochs": 50, "energy": 0.98}}
    published_source = "configs/cifar100_inflora.json and configs/mimg10_inflora.json of the authors' code"
    grid = {"learning_rate": (5e-4, 1.5e-4, 1.5e-3)}
    state_fields = {"projections": "once", "attention": "once", "head": "per class"}
    test_settings = {**Network.test_settings, "epochs": 10, "learning_rate": 0.03, "rank": 6, "energy": 0.6}
    optimiser_class = torch.optim.Adam
    settings: InfLoRASettings

    def __init__(self, backbone: Backbone, settings: InfLoRASettings):
        super().__init__(backbone, settings)
        self.vit.requires_grad_(False)
        # P of each layer, [layers, D, D].
        self.projections = torch.zeros(backbone.depth, backbone.dim, backbone.dim, dtype=torch.float64)

    @property
    def attention(self) -> nn.ModuleList:
        """The joint q, k, v projection of every layer."""
        return nn.ModuleList(attention.qkv for attention in self._attentions())

    def _attentions(self) -> list[Attention]:
        return [cast(Attention, block.get_submodule("attn")) for block in self.backbone.vit.blocks]

    def begin_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Choose the directions of the task, and add updates that start at zero."""
        grams, rank = self.input_grams(task), min(self.settings.rank, self.backbone.dim)
        for attention, gram, projection in zip(self._attentions(), grams, self.projections, strict=True):
            directions = torch.linalg.svd(gram - projection @ gram).U[:, :rank].T / math.sqrt(3)
            attention.qkv = LowRankQKV(attention.qkv, directions.float().to(self.backbone.device))

    def input_grams(self, task: TrainingTask) -> Tensor:
        """Compute the mean of x x^T over all tokens x that enter each layer's attention, [layers, D, D]."""
        grams, tokens = torch.zeros_like(self.projections), 0

        def reader(layer: int) -> Callable[[nn.Module, object, Tensor], None]:
            def read(_module: nn.Module, _inputs: object, x: Tensor) -> None:
                nonlocal tokens
                rows = x.detach().double().cpu().flatten(0, 1)  # [B * N, D]
                grams[layer] += rows.T @ rows
                tokens += len(rows) if layer == 0 else 0

            return read

        norms = [block.get_submodule("norm1") for block in self.backbone.vit.blocks]
        hooks = [norm.register_forward_hook(reader(layer)) for layer, norm in enumerate(norms)]
        try:
            embed_task(task, self.backbone, self.embed_batch_size, "statistics")
        finally:
            for hook in hooks:
                hook.remove()
        return grams / tokens

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the updates and the head, by name."""
        updates = {f"up.{i}": qkv.up for i, qkv in enumerate(self.attention) if isinstance(qkv, LowRankQKV)}
        return {**updates, **dict(self.head.named_parameters("head"))}

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy over the task's classes."""
        return task_cross_entropy(logits, labels, len(self.classes))

    def end_task(self, task: TrainingTask, labels: Tensor) -> None:
        """Add the updates to the weights, and protect the directions that the task needs."""
        for attention in self._attentions():
            assert isinstance(attention.qkv, LowRankQKV)
            attention.qkv = attention.qkv.to_plain()
        s, earlier_count = self.settings, len(self.tasks) - 1
        share = min(1.0, s.energy + (1 - s.energy) * earlier_count / s.expected_tasks)
        grams = self.input_grams(task)
        self.projections = torch.stack(
            [protect(gram, projection, share) for gram, projection in zip(grams, self.projections, strict=True)]
        )

    def trained_parameters(self) -> int:
        """Return the size of all tasks' updates and of the head."""
        rank = min(self.settings.rank, self.backbone.dim)
        updates = len(self.tasks) * self.backbone.depth * 2 * self.backbone.dim * rank
        return updates + sum(p.numel() for p in self.head.parameters())


def protect(gram: Tensor, projection: Tensor, share: float) -> Tensor:
    """Extend a projection so that it keeps a share of a Gram matrix's energy; all [D, D].

    The energy is the sum of squared singular values. What is missing is added along the first singular vectors of what
    the projection does not keep; a first projection gets one direction at least, and stays below the share.
    """
    total = torch.linalg.svdvals(gram).square().sum()
    svd = torch.linalg.svd(gram - projection @ gram)
    ratios = svd.S.square() / total
    if not projection.any():
        count = max(1, int((ratios.cumsum(0) < share).sum()))
    else:
        prior_shares = 1 - ratios.sum() + torch.cat([ratios.new_zeros(1), ratios.cumsum(0)[:-1]])
        count = int((prior_shares < share).sum())
    return projection + svd.U[:, :count] @ svd.U[:, :count].T
