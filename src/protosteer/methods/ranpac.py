"""RanPAC (McDonnell et al., NeurIPS 2023): ridge regression on random ReLU features.

An embedding f becomes h = relu(f P) with a fixed random P [D, M]; `ridge.py` has the regression on h. Before that, the
backbone is adapted to the first task ("Phase 1"), by adapters as the authors do for CIFAR-100. `first_session=none` is
the paper's ablation "No Phase 1". Few images hardly train adapters at the published rate; so the grid has both, and the
prompt of `fast`.

Differences: lambda minimises the squared leave-one-out error, in closed form, summed over the tasks when they are
learned. The authors' code splits each task's images 80 to 20 and regards the current task alone. Adapters have no dropout;
SSF, which the authors use for ImageNet-R, ImageNet-A and VTAB, is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Source, register_method
from protosteer.methods.first_session import FirstSessionSettings
from protosteer.methods.ridge import Ridge, Spectrum, loo_errors
from protosteer.settings import setting

LAMBDAS = 10.0 ** torch.arange(-8, 9, dtype=torch.float64)


@dataclass(frozen=True)
class RanPACSettings(FirstSessionSettings):
    """Settings of RanPAC."""

    first_session: str = "adapter"
    features: int = setting(10_000, at_least=1, at_most=100_000)  # M


@register_method("ranpac")
class RanPAC(Ridge):
    """Ridge regression on random features."""

    source = Source(
        "McDonnell et al.", "RanPAC: random projections and pre-trained models for continual learning", "NeurIPS", 2023
    )
    settings_class = RanPACSettings
    published = {
        "split-cifar100": {},
        "cub200": {},
        "omnibenchmark": {"first_session": "vpt"},
        "cars": {"first_session": "vpt"},
        "imagenet-r": {"epochs": 10, "batch_size": 16, "learning_rate": 0.05, "weight_decay": 5e-3},
    }
    older_settings = {"first_session": "none"}
    published_source = (
        "args/*_publish.csv of the authors' code; ImageNet-R, where they use SSF: LAMDA-PILOT, exps/ranpac_inr.json"
    )
    state_fields = {**Ridge.state_fields, "errors": "once"}
    test_settings = {"features": 50, **Ridge.test_settings}

    def __init__(self, backbone: Backbone, settings: RanPACSettings):
        super().__init__(backbone, settings, settings.features)
        draw = torch.Generator().manual_seed(settings.seed)
        self.projection = torch.randn(backbone.dim, settings.features, generator=draw)  # P [D, M]
        # The squared leave-one-out error for each lambda.
        self.errors = torch.zeros(len(LAMBDAS), dtype=torch.float64)

    def map_features(self, embeddings: Tensor) -> Tensor:
        """Project embeddings [n, D] to features [n, M]."""
        return F.relu(embeddings @ self.projection)

    def choose_strength(self, hidden: Tensor, targets: Tensor, spectrum: Spectrum) -> float:
        """Choose the lambda of the smallest leave-one-out error over all tasks."""
        self.errors = self.errors + loo_errors(hidden, targets, self.sums, spectrum, LAMBDAS)
        return float(LAMBDAS[self.errors.argmin()])
