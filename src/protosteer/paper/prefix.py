"""Prefix tuning: what layers attend to beside their tokens, given as keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Prefix:
    """Keys and values of further places that layers attend to (prefix tuning), as the layers take them.

    layers: for layer 1, 2, ...: [B, 2, L, D], one each for B images, [1, 2, L, D], for all, or None.
    """

    layers: tuple[Tensor | None, ...]

    @property
    def present(self) -> list[Tensor]:
        return [layer for layer in self.layers if layer is not None]

    @property
    def requires_grad(self) -> bool:
        return any(layer.requires_grad for layer in self.present)

    @property
    def ndim(self) -> int:
        """As a prompt would have it: 4 if every image has its own, 3 if all have the same."""
        return 4 if len(self) > 1 else 3

    def __len__(self) -> int:
        return max(map(len, self.present), default=1)

    def __getitem__(self, rows: Any) -> Prefix:
        """That of some images."""
        return Prefix(
            tuple(t[rows] if t is not None and len(t) > 1 else t for t in self.layers)  # shared: all have it
        )

    def to(self, like: Tensor) -> Prefix:
        return Prefix(tuple(None if layer is None else layer.to(like) for layer in self.layers))


Prompt = Tensor | Prefix
