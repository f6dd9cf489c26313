"""CODA-Prompt (Smith et al., CVPR 2023): prompts that are sums of components, weighted by attention.

In each of the first layers, component m is a prompt P_m [L, D] with a key K_m [D] and an attention vector A_m [D].
An image with the plain embedding q gets the sum over all components of all tasks

    P = sum_m cos(q * A_m, K_m) P_m        (* element by element),

of which half the tokens are keys and half are values for the layer's attention. A linear head reads the embedding.
Each task trains new components; those of earlier tasks still count but never change. New components start as
orthonormal vectors, orthogonal to all earlier ones, and the loss is

    cross-entropy + orthogonality * sum over layers and over B = P, K, A of mean((B B^T - I)^2),

where B has one row per component, earlier ones included.

This follows the authors' code (github.com/GT-RIPL/CODA-Prompt). Unlike the paper, it draws new components when their
task begins, and then needs no penalty: `orthogonality` is 0 there and here. Differences from the code: new components
are projected on the complement of the earlier ones' span; there, earlier ones are subtracted one by one as if they
were still orthogonal. If the components of all tasks outnumber the dimensions, new ones are orthonormal only among
themselves. The learning rate falls to zero by half a cosine at every step; there, by a quarter cosine every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.errors import SettingsError
from protosteer.methods.base import Source, register_method
from protosteer.methods.prefix_vit import Prefix
from protosteer.methods.prompt_base import Prompted
from protosteer.methods.training_utils import TrainingSettings
from protosteer.settings import setting


@dataclass(frozen=True)
class CODAPromptSettings(TrainingSettings):
    """Settings of CODA-Prompt.

    Defaults are those of the authors' code for CIFAR-100: 100 components for 10 tasks, and no gradient clipping.
    """

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
            message = f"prompt_length = {self.prompt_length}: must be even, half keys and half values"
            raise SettingsError(message, code="odd-prompt-length", name="prompt_length")


@register_method("coda-prompt")
class CODAPrompt(Prompted):
    """Prompts composed of components by attention."""

    source = Source(
        "Smith et al.",
        "CODA-Prompt: continual decomposed attention-based prompting for rehearsal-free continual learning",
        "CVPR",
        2023,
    )
    trains = "components of prompts per task, head"
    settings_class = CODAPromptSettings
    published = {"split-cifar100": {}, "imagenet-r": {"epochs": 50}}
    published_source = (
        "configs/cifar-100_prompt.yaml, configs/imnet-r_prompt.yaml and experiments/*.sh of the authors' code"
    )
    grid = {"learning_rate": (1e-3, 3e-4, 3e-3)}
    test_settings = {**Prompted.test_settings, "components": 3, "orthogonality": 0.1, "augmentation": "none"}
    settings: CODAPromptSettings

    def __init__(self, backbone: Backbone, settings: CODAPromptSettings):
        super().__init__(backbone, settings)
        if settings.components > backbone.dim:
            message = (
                f"components = {settings.components}: must be orthogonal, but {backbone.name} has only "
                f"{backbone.dim} dimensions"
            )
            raise SettingsError(message, code="too-many-components", name="components")

    def new_task_parameters(self) -> dict[str, Tensor]:
        """Draw the M components of a task, [layers, M, ...]."""
        s, dim = self.settings, self.backbone.dim
        layers = range(min(s.prompt_layers, self.backbone.depth))
        parameters = {}
        for name, width in (("prompts", s.prompt_length * dim), ("keys", dim), ("attention", dim)):
            earlier_rows = self._rows(name) if self.tasks else torch.empty(len(layers), 0, width)
            parameters[name] = torch.stack(
                [draw_orthonormal(s.components, earlier_rows[layer].cpu(), self.generator) for layer in layers]
            )
        parameters["prompts"] = parameters["prompts"].unflatten(2, (s.prompt_length, dim))
        return parameters

    def _rows(self, name: str) -> Tensor:
        """Return one row per component of all tasks, [layers, M, width]."""
        return self.all_tasks(name).transpose(0, 1).flatten(1, 2).flatten(2)

    def prompt(self, queries: Tensor) -> Prefix:
        """Sum the components for each query [B, D]."""
        prompts, keys, attention = (self._rows(name) for name in ("prompts", "keys", "attention"))
        # cos(q * A, K) by matrix products: no [B, layers, M, D] in between.
        lengths = (queries**2 @ (attention**2).transpose(1, 2)).clamp_min(1e-12).sqrt()
        weights = queries @ (attention * F.normalize(keys, dim=2)).transpose(1, 2) / lengths  # [layers, B, M]
        sums = weights @ prompts  # [layers, B, L * D]
        return Prefix(tuple(sums.unflatten(2, (2, -1, self.backbone.dim))))

    def training_prompt(self, queries: Tensor) -> tuple[Prompt, Tensor]:
        """Return the same prompts, and the penalty on components that are not orthonormal."""
        return self.prompt(queries), self.settings.orthogonality * self.overlap()

    def overlap(self) -> Tensor:
        """Measure how far the components are from orthonormal."""
        total = torch.zeros((), device=self.backbone.device)
        for name in ("prompts", "keys", "attention"):
            rows = self._rows(name)
            products = rows @ rows.transpose(1, 2)  # [layers, M, M]
            identity = torch.eye(products.shape[1], device=rows.device)
            total = total + (products - identity).square().mean(dim=(1, 2)).sum()
        return total


def draw_orthonormal(count: int, earlier_rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw orthonormal rows [count, W], orthogonal to `earlier_rows` [k, W] if dimensions allow."""
    rows = torch.randn(count, earlier_rows.shape[1], generator=generator)
    if len(earlier_rows) + count <= earlier_rows.shape[1]:
        span = torch.linalg.qr(earlier_rows.T).Q  # [W, k]
        for _ in range(2):  # the second time removes what rounding left
            rows = rows - rows @ span @ span.T
    return torch.linalg.qr(rows.T).Q.T.contiguous()
