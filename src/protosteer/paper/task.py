"""One task: the images it is learned from, and the seed of its randomness."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor


class Embedder(Protocol):
    """Images from which prototypes can be made."""

    def embed(self, prompt: Tensor | None) -> Tensor:
        """[n, D]: all of them under a prompt, or without one, by the evaluation transform."""


class TrainingImages(Embedder, Protocol):
    """The images of one task, which a prompt can be trained with."""

    def views(self, batches: Sequence[Tensor]) -> Iterable[Tensor]:
        """See `training.Views`."""


def task_seed(seed: int, classes: Sequence[str]) -> int:
    """Randomness belongs to a task's own classes, not to its place in the order of tasks."""
    digest = hashlib.sha256(json.dumps([seed, sorted(classes)]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
