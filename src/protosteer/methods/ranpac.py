"""Ridge regression on random ReLU features of the frozen backbone, after RanPAC (McDonnell et al., NeurIPS
2023).

An embedding f becomes h = relu(f P) with a fixed random P [D, M]; classes are told by W = (G + lambda I)^-1 C
with the sums G = H^T H and C = H^T Y over all images so far. Its adaptation of the backbone on the first task
is left out: these are the same features that every other method here has.

G is kept as a factor R [k, M] with G = R^T R, which is as exact and smaller while there are fewer images than
features. lambda has the least squared error of images left out, in closed form, summed over the tasks when
they are learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.training_utils import embedded, numbered
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.runtime.progress import OnStage
from protosteer.settings import Values, setting

LAMBDAS = 10.0 ** torch.arange(-8, 9, dtype=torch.float64)


@dataclass(frozen=True)
class RanPACSettings(Values):
    features: int = setting(10_000, at_least=1, at_most=100_000)  # M
    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)
    seed: int = setting(0, at_least=0)


class RanPAC(Method):
    name = "ranpac"
    source = Source(
        "McDonnell et al.",
        "RanPAC: random projections and pre-trained models for continual learning",
        "NeurIPS",
        2023,
    )
    settings_class = RanPACSettings
    again = True

    def __init__(self, backbone: Backbone, settings: RanPACSettings):
        super().__init__(backbone, settings)
        draw = torch.Generator().manual_seed(settings.seed)
        self.projection = torch.randn(backbone.dim, settings.features, generator=draw)  # P
        self.factor = torch.empty(0, settings.features, dtype=torch.float64)  # R
        self.sums = torch.empty(settings.features, 0, dtype=torch.float64)  # C
        self.errors = torch.zeros(len(LAMBDAS), dtype=torch.float64)  # of images left out, for each lambda
        self.weights = torch.empty(settings.features, 0)  # W

    def learn(
        self, task: TaskData, on_stage: OnStage | None = None, checkpoint: CheckpointFile | None = None
    ) -> None:
        classes, labels = numbered(task, self.classes)
        hidden = self._features(embedded(task, self.backbone, self.embed_batch_size, on_stage))
        targets = F.one_hot(labels, len(self.classes) + len(classes)).double()
        self.sums = F.pad(self.sums, (0, len(classes))) + hidden.T @ targets
        roots, directions = _spectrum(torch.cat([self.factor, hidden]))
        self.factor = roots[:, None] * directions
        self.errors = self.errors + _left_out(hidden, targets, self.sums, roots, directions)
        shrunk = 1 / (roots**2 + LAMBDAS[self.errors.argmin()])
        self.weights = (directions.T @ (shrunk[:, None] * (directions @ self.sums))).float()
        self.tasks.append(classes)

    def _features(self, embeddings: Tensor) -> Tensor:
        return F.relu(embeddings @ self.projection).double()

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        hidden = F.relu(images.embed(torch.arange(len(images))) @ self.projection)
        return Answer((hidden @ self.weights).argmax(dim=1))

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("factor", "sums", "errors", "weights")}

    def bytes_per_task(self) -> list[int]:
        """The sums G and C as the paper keeps them: G comes with the first task."""
        rows = [4 * self.settings.features * len(task) for task in self.tasks]
        return [rows[0] + 4 * self.settings.features**2, *rows[1:]] if rows else []


def _spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values [k] and right singular vectors [k, M] of `rows` [n, M], without those that vanish."""
    squares, left = torch.linalg.eigh(rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows)
    kept = squares > squares[-1] * 1e-12
    roots = squares[kept].sqrt()
    if len(rows) > rows.shape[1]:
        return roots, left[:, kept].T
    return roots, (left[:, kept] / roots).T @ rows


def _left_out(hidden: Tensor, targets: Tensor, sums: Tensor, roots: Tensor, directions: Tensor) -> Tensor:
    """Squared error of every row of `hidden`, had it been left out of all that is summed: one number per
    lambda.

    e / (1 - h^T (G + lambda I)^-1 h), with e the error of the ridge that has seen it.
    """
    inside, seen = hidden @ directions.T, directions @ sums
    errors = []
    for ridge in LAMBDAS:
        shrunk = 1 / (roots**2 + ridge)
        leverage = (inside**2 * shrunk).sum(dim=1, keepdim=True)
        errors.append((((targets - inside @ (shrunk[:, None] * seen)) / (1 - leverage)) ** 2).sum())
    # Where a ridge is too small for the digits of the numbers, there is nothing to divide by.
    return torch.stack(errors).nan_to_num(nan=torch.inf)
