"""RanPAC (McDonnell et al., NeurIPS 2023): ridge regression on random ReLU features of the frozen backbone.

An embedding f becomes h = relu(f P) with a fixed random P [D, M]. Class scores are h W with W = (G + lambda I)^-1 C,
from the sums G = H^T H and C = H^T Y over all images so far. The paper's adaptation of the backbone on the first task
is omitted: all methods here have the same features.

G is stored as a factor R [k, M] with G = R^T R, which is exact and smaller while there are fewer images than features.
lambda minimises the squared leave-one-out error, in closed form, summed over the tasks when they are learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, MethodSettings, Source, TrainingTask, register_method
from protosteer.methods.training_utils import embed_task, number_labels
from protosteer.settings import setting

LAMBDAS = 10.0 ** torch.arange(-8, 9, dtype=torch.float64)


@dataclass(frozen=True)
class RanPACSettings(MethodSettings):
    """Settings of RanPAC."""

    features: int = setting(10_000, at_least=1, at_most=100_000)  # M


@register_method("ranpac")
class RanPAC(Method):
    """Ridge regression on random features."""

    source = Source(
        "McDonnell et al.", "RanPAC: random projections and pre-trained models for continual learning", "NeurIPS", 2023
    )
    settings_class = RanPACSettings
    supports_repeated_classes = True
    state_fields = dict.fromkeys(("factor", "sums", "errors", "weights"), "once")
    test_settings = {"features": 50}

    def __init__(self, backbone: Backbone, settings: RanPACSettings):
        super().__init__(backbone, settings)
        draw = torch.Generator().manual_seed(settings.seed)
        self.projection = torch.randn(backbone.dim, settings.features, generator=draw)  # P [D, M]
        self.factor = torch.empty(0, settings.features, dtype=torch.float64)  # R [k, M]
        self.sums = torch.empty(settings.features, 0, dtype=torch.float64)  # C [M, K]
        # The squared leave-one-out error for each lambda.
        self.errors = torch.zeros(len(LAMBDAS), dtype=torch.float64)
        self.weights = torch.empty(settings.features, 0)  # W [M, K]

    def learn(self, task: TrainingTask) -> None:
        """Add the task to the sums, and solve for the weights."""
        classes, labels = number_labels(task, self.classes)
        hidden = self._features(embed_task(task, self.backbone, self.embed_batch_size))
        targets = F.one_hot(labels, len(self.classes) + len(classes)).double()
        self.sums = F.pad(self.sums, (0, len(classes))) + hidden.T @ targets
        roots, directions = _spectrum(torch.cat([self.factor, hidden]))
        self.factor = roots[:, None] * directions
        self.errors = self.errors + _loo_errors(hidden, targets, self.sums, roots, directions)
        shrunk = 1 / (roots**2 + LAMBDAS[self.errors.argmin()])
        self.weights = (directions.T @ (shrunk[:, None] * (directions @ self.sums))).float()
        self.tasks.append(classes)

    def _features(self, embeddings: Tensor) -> Tensor:
        return F.relu(embeddings @ self.projection).double()

    def answer(self, images: Images) -> Answer:
        """Predict the class with the largest score."""
        self.require_knowledge()
        hidden = F.relu(images.embed(torch.arange(len(images))) @ self.projection)
        return Answer((hidden @ self.weights).argmax(dim=1))

    def bytes_per_task(self) -> list[int]:
        """Return the bytes of the sums G and C, as the paper stores them; G comes with the first task."""
        rows = [4 * self.settings.features * len(task) for task in self.tasks]
        return [rows[0] + 4 * self.settings.features**2, *rows[1:]] if rows else []


def _spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the non-zero singular values [k] and right singular vectors [k, M] of rows [n, M]."""
    squares, left = torch.linalg.eigh(rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows)
    positive = squares > squares[-1] * 1e-12
    roots = squares[positive].sqrt()
    if len(rows) > rows.shape[1]:
        return roots, left[:, positive].T
    return roots, (left[:, positive] / roots).T @ rows


def _loo_errors(hidden: Tensor, targets: Tensor, sums: Tensor, roots: Tensor, directions: Tensor) -> Tensor:
    """Compute the squared leave-one-out error of all rows of `hidden`, for each lambda.

    It is e / (1 - h^T (G + lambda I)^-1 h), with e the error of the ridge that has seen the row.
    """
    projected, solution = hidden @ directions.T, directions @ sums
    errors = []
    for ridge in LAMBDAS:
        shrunk = 1 / (roots**2 + ridge)
        leverage = (projected**2 * shrunk).sum(dim=1, keepdim=True)
        errors.append((((targets - projected @ (shrunk[:, None] * solution)) / (1 - leverage)) ** 2).sum())
    # A ridge that is too small for double precision divides by zero.
    return torch.stack(errors).nan_to_num(nan=torch.inf)
