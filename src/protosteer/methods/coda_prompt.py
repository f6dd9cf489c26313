"""CODA-Prompt: prompts that are sums of components, weighted by attention (Smith et al., CVPR 2023).

In each of the first layers, component m is a prompt P_m [L, D] with a key K_m [D] and an attention vector A_m [D].
An image whose embedding by the frozen backbone is q gets the sum over all components of all tasks

    P = sum_m cos(q * A_m, K_m) P_m        (* element by element),

half of whose tokens are keys and half values that the layer attends to beside its tokens. A linear head reads the
embedding. Each task trains new components; those of earlier tasks go on counting but are never changed. New
components start as orthonormal vectors, orthogonal to all earlier ones, and the loss is

    cross-entropy + orthogonality * sum over layers and over B = P, K, A of mean((B B^T - I)^2),

B having one row per component, earlier ones included.

This follows the authors' code (github.com/GT-RIPL/CODA-Prompt), which differs from the paper in drawing new
components when their task begins, whereupon no penalty was needed: `orthogonality` is 0 there, and here. Here earlier components are left by projection on the complement of their span, there one after the other
as if they still were orthogonal; where the components of all tasks outnumber the dimensions, new ones are
orthonormal among themselves alone. The rate falls to zero by half a cosine in every step, there by a quarter of
one in every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.errors import SettingsError
from protosteer.methods.base import Source
from protosteer.methods.prefix_vit import Prefix
from protosteer.methods.prompt_base import Prompted
from protosteer.methods.training_utils import Training
from protosteer.settings import setting


@dataclass(frozen=True)
class CODAPromptSettings(Training):
    # All as in the authors' code for CIFAR-100: 100 components for 10 tasks; it clips no gradient.
    components: int = setting(10, at_least=1, at_most=10_000)  # per task
    prompt_length: int = setting(8, at_least=2, at_most=4096)  # half keys, half values
    prompt_layers: int = setting(5, at_least=1)  # from the first
    orthogonality: float = setting(0.0, at_least=0)
    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    weight_decay: float = 0.0
    gradient_clip: float = 1e6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_length % 2:
            raise SettingsError(f"prompt_length = {self.prompt_length}: must be even, half keys, half values")


class CODAPrompt(Prompted):
    name = "coda-prompt"
    source = Source(
        "Smith et al.",
        "CODA-Prompt: continual decomposed attention-based prompting for rehearsal-free continual learning",
        "CVPR",
        2023,
    )
    trains = "components of prompts per task, head"
    settings_class = CODAPromptSettings
    settings: CODAPromptSettings

    def __init__(self, backbone: Backbone, settings: CODAPromptSettings):
        super().__init__(backbone, settings)
        if settings.components > backbone.dim:
            raise SettingsError(
                f"components = {settings.components}: {backbone.name} has only {backbone.dim} dimensions, and "
                "those of a task are orthogonal"
            )

    def new_own(self) -> dict[str, Tensor]:
        """[layers, M, ...] for the M components of a task."""
        s, dim = self.settings, self.backbone.dim
        layers = range(min(s.prompt_layers, self.backbone.depth))
        own = {}
        for name, width in (("prompts", s.prompt_length * dim), ("keys", dim), ("attention", dim)):
            earlier = self._rows(name) if self.tasks else torch.empty(len(layers), 0, width)
            own[name] = torch.stack([orthonormal(s.components, earlier[layer].cpu()) for layer in layers])
        own["prompts"] = own["prompts"].unflatten(2, (s.prompt_length, dim))
        return own

    def _rows(self, name: str) -> Tensor:
        """[layers, M of all tasks, width]: one row per component."""
        return self.whole(name).transpose(0, 1).flatten(1, 2).flatten(2)

    def prompt(self, queries: Tensor) -> Prefix:
        prompts, keys, attention = (self._rows(name) for name in ("prompts", "keys", "attention"))
        # cos(q * A, K) by products of matrices: there is no [B, layers, M, D] in between.
        lengths = (queries**2 @ (attention**2).transpose(1, 2)).clamp_min(1e-12).sqrt()
        weights = queries @ (attention * F.normalize(keys, dim=2)).transpose(1, 2) / lengths  # [layers, B, M]
        sums = weights @ prompts  # [layers, B, L * D]
        return Prefix(tuple(sums.unflatten(2, (2, -1, self.backbone.dim))))

    def training_prompt(self, queries: Tensor) -> tuple[Prompt, Tensor]:
        return self.prompt(queries), self.settings.orthogonality * self.overlap()

    def overlap(self) -> Tensor:
        """How far the components are from orthonormal."""
        total = torch.zeros((), device=self.backbone.device)
        for name in ("prompts", "keys", "attention"):
            rows = self._rows(name)
            products = rows @ rows.transpose(1, 2)  # [layers, M, M]
            wanted = torch.eye(products.shape[1], device=rows.device)
            total = total + (products - wanted).square().mean(dim=(1, 2)).sum()
        return total


def orthonormal(count: int, earlier: Tensor) -> Tensor:
    """[count, W]: random directions, orthogonal to the rows of `earlier` [k, W] where there is room."""
    drawn = torch.randn(count, earlier.shape[1])
    if len(earlier) + count <= earlier.shape[1]:
        span = torch.linalg.qr(earlier.T).Q  # [W, k]
        for _ in range(2):  # once more for what rounding has left
            drawn = drawn - drawn @ span @ span.T
    return torch.linalg.qr(drawn.T).Q.T.contiguous()
