"""Base class of methods with a ridge regression that is updated task by task: RanPAC and LayUP.

H [n, M] are the features and Y [n, K] the one-hot labels of all images so far. Class scores are h W with
W = (G + lambda I)^-1 C. Only the sums G = H^T H and C = H^T Y are needed.

G is stored as a factor R [k, M] with G = R^T R, which is exact and smaller while there are fewer images than features.
Everything is computed in double precision.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.methods.base import Answer, Images, TrainingTask
from protosteer.methods.first_session import FirstSession, FirstSessionSettings
from protosteer.methods.training_utils import number_labels


class Spectrum(NamedTuple):
    """The non-zero singular values [k] of feature rows [n, M], and their right singular vectors [k, M]."""

    roots: Tensor
    directions: Tensor


class Ridge(FirstSession):
    """Ridge regression on M `features` of an adapted or plain backbone."""

    trains = "adapters, on the first task"
    grid = {"first_session": ("adapter", "none", "prompt")}
    test_settings = {
        "epochs": 2, "batch_size": 8, "augmentation": "crop", "prompt_length": 2, "learning_rate": 0.1,
        "adapter_scale": 1.0,
    }  # fmt: skip
    supports_repeated_classes = True
    state_fields = {**FirstSession.state_fields, **dict.fromkeys(("factor", "sums", "weights"), "once")}

    def __init__(self, backbone: Backbone, settings: FirstSessionSettings, features: int):
        super().__init__(backbone, settings)
        self.factor = torch.empty(0, features, dtype=torch.float64)  # R [k, M]
        self.sums = torch.empty(features, 0, dtype=torch.float64)  # C [M, K]
        self.weights = torch.empty(features, 0)  # W [M, K]

    @abstractmethod
    def map_features(self, embeddings: Tensor) -> Tensor:
        """Compute features [n, M] from what the backbone returned for n images."""

    @abstractmethod
    def choose_strength(self, hidden: Tensor, targets: Tensor, spectrum: Spectrum) -> float:
        """Choose lambda from a task's features [n, M] and one-hot labels [n, K].

        `factor` has the earlier tasks only, `sums` and `spectrum` have this task too.
        """

    def learn(self, task: TrainingTask) -> None:
        """Adapt to the first task; add the task to the sums, and solve for the weights."""
        self.adapt(task)
        classes, labels = number_labels(task, self.classes)
        hidden = self.map_features(self.embed_task(task)).double()
        targets = F.one_hot(labels, len(self.classes) + len(classes)).double()
        self.sums = F.pad(self.sums, (0, len(classes))) + hidden.T @ targets
        roots, directions = spectrum = spectrum_of(torch.cat([self.factor, hidden]))
        strength = self.choose_strength(hidden, targets, spectrum)
        self.factor = roots[:, None] * directions
        inverses = 1 / (roots**2 + strength)
        self.weights = (directions.T @ (inverses[:, None] * (directions @ self.sums))).float()
        self.tasks.append(classes)

    def answer(self, images: Images) -> Answer:
        """Predict the class with the largest score."""
        scores = self.map_features(self.embed(images)) @ self.weights
        return Answer(scores.argmax(dim=1), scores=scores)

    def bytes_per_task(self) -> list[int]:
        """Return the bytes of the sums G and C in float32, as the papers store them; G comes with the first task."""
        features = len(self.weights)
        rows = [4 * features * len(task) for task in self.tasks]
        shared_bytes = 4 * features**2 + sum(tensor.nbytes for tensor in self.adaptation.values())
        return [rows[0] + shared_bytes, *rows[1:]] if rows else []


def spectrum_of(rows: Tensor) -> Spectrum:
    """Compute the spectrum of rows [n, M]."""
    squares, vectors = torch.linalg.eigh(rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows)
    mask = squares > squares[-1] * 1e-12
    roots = squares[mask].sqrt()
    if len(rows) > rows.shape[1]:
        return Spectrum(roots, vectors[:, mask].T)
    return Spectrum(roots, (vectors[:, mask] / roots).T @ rows)


def loo_errors(hidden: Tensor, targets: Tensor, sums: Tensor, spectrum: Spectrum, strengths: Tensor) -> Tensor:
    """Compute the squared leave-one-out error of all rows of `hidden` [n, M], for each lambda.

    It is e / (1 - h^T (G + lambda I)^-1 h), with e the error of the ridge that has seen the row.
    """
    roots, directions = spectrum
    projections, solution = hidden @ directions.T, directions @ sums
    errors = []
    for ridge in strengths:
        inverses = 1 / (roots**2 + ridge)
        leverage = (projections**2 * inverses).sum(dim=1, keepdim=True)
        errors.append((((targets - projections @ (inverses[:, None] * solution)) / (1 - leverage)) ** 2).sum())
    # A ridge that is too small for double precision divides by zero.
    return torch.stack(errors).nan_to_num(nan=torch.inf)


def fold_accuracy(
    hidden: Tensor, targets: Tensor, factor: Tensor, sums: Tensor, folds: Tensor, strengths: Sequence[float]
) -> Tensor:
    """Compute the accuracy of a cross-validation over a task's images, for each lambda; the mean over folds.

    Args:
        hidden: Features of the task [n, M].
        targets: One-hot labels [n, K].
        factor: R of earlier tasks, which every fold learns from, [k, M].
        sums: C of earlier tasks [M, K].
        folds: The fold of each image [n].
        strengths: Values of lambda.

    Returns:
        Accuracies from 0 to 1, one for each lambda.
    """
    accuracies = []
    for fold in folds.unique():
        train_rows, test_rows = hidden[folds != fold], hidden[folds == fold]
        roots, directions = spectrum_of(torch.cat([factor, train_rows]))
        solution = directions @ (sums + train_rows.T @ targets[folds != fold])
        projections, truth = test_rows @ directions.T, targets[folds == fold].argmax(dim=1)
        predictions = [(projections @ (solution / (roots**2 + ridge)[:, None])).argmax(dim=1) for ridge in strengths]
        accuracies.append(torch.stack([(classes == truth).double().mean() for classes in predictions]))
    return torch.stack(accuracies).mean(dim=0)
