"""The state of a loop over epochs of shuffled batches, which callbacks report, save and restore."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from protosteer.errors import TrainingError


class Callback(Protocol):
    """Follows a training; may save its state and, when it begins, restore one."""

    def on_train_begin(self, state: TrainingState) -> None:
        """Called before the first step."""

    def on_step_end(self, state: TrainingState) -> None:
        """Called after each step."""


@dataclass(frozen=True)
class Epoch:
    """Metrics of one epoch; accuracy and spread are those of the augmented images' embeddings."""

    loss: float
    accuracy: float  # percent nearest to their own class mean
    spread: float  # mean cosine to their common mean


class Stateful(Protocol):
    """Other state that changes during a training, such as a buffer of images."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything as tensors by name."""

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""


class TrainingState:
    """The state of a loop over epochs of shuffled batches, which a callback can report, save and restore."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimiser: torch.optim.Optimizer,
        labels: Tensor,
        batch_size: int,
        epochs: int,
        generator: torch.Generator,
        companion: Stateful | None = None,
    ):
        self.companion = companion  # saved and restored with the training
        self.parameters = parameters
        self.optimiser = optimiser
        self.labels = labels
        self.batch_size = batch_size
        self.generator = generator  # of everything random in this training
        self.steps_per_epoch = max(1, len(labels) // batch_size)
        self.steps = self.steps_per_epoch * epochs
        self.history: list[Epoch] = []  # of finished epochs
        self.batches: list[Tensor] = []  # rows of each batch of the current epoch
        self.losses: list[float] = []  # of its finished steps
        self.embeddings: list[Tensor] = []  # [N, D] of its finished steps

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return len(self.history)

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.epoch * self.steps_per_epoch + len(self.losses)

    def remaining_batches(self) -> list[Tensor]:
        """Return the remaining batches of the current epoch; shuffle a new epoch."""
        self.batches = self.batches or epoch_batches(len(self.labels), self.batch_size, self.generator)
        return self.batches[len(self.losses) :]

    def end_step(self, loss: Tensor, embeddings: Tensor) -> None:
        """Record a step."""
        self.losses.append(loss.item())
        self.embeddings.append(embeddings.detach().float().cpu())
        if not math.isfinite(self.losses[-1]):
            message = (
                f"the loss became {self.losses[-1]} in epoch {self.epoch + 1}, step {len(self.losses)}; lower "
                f"learning_rate (now {self.optimiser.defaults['lr']:g}) or raise temperature"
            )
            raise TrainingError(message, code="loss-not-finite", epoch=self.epoch + 1, step=len(self.losses))

    def end_epoch(self, measure: Callable[[Tensor, Tensor], tuple[float, float]]) -> None:
        """Record an epoch; `measure` maps its embeddings [n, D] and labels [n] to accuracy and spread."""
        embeddings, labels = torch.cat(self.embeddings), self.labels[torch.cat(self.batches)]
        _, dense = labels.unique(return_inverse=True)  # a dropped last batch may hold a whole class
        self.history.append(Epoch(sum(self.losses) / len(self.losses), *measure(embeddings, dense)))
        self.batches, self.losses, self.embeddings = [], [], []

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and plain data for `load_state_dict`, without parameters, optimiser and random state."""
        tensors = {"order": torch.stack(self.batches), "seen": torch.cat(self.embeddings)}
        if self.companion is not None:
            tensors |= {f"companion/{name}": tensor for name, tensor in self.companion.state_dict().items()}
        history = [dataclasses.astuple(epoch) for epoch in self.history]
        return tensors, {"history": history, "losses": self.losses}

    def load_state_dict(self, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, between two steps."""
        self.history = [Epoch(*epoch) for epoch in notes["history"]]
        self.losses = list(notes["losses"])
        self.batches, self.embeddings = list(tensors["order"]), [tensors["seen"]]
        if self.companion is not None:
            companion_tensors = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith("companion/")}
            self.companion.load_state_dict(companion_tensors)


def epoch_batches(count: int, batch_size: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Draw the rows of one epoch in random order; drop a short last batch, unless it is the only one."""
    batches = list(torch.randperm(count, generator=generator).split(batch_size))
    return batches[:-1] if len(batches) > 1 and len(batches[-1]) < batch_size else batches
